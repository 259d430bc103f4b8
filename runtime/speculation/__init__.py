"""Speculation: tokens guessed ahead and verified together in one step.

`draft.py` says what a draft is, `mtp_drafter.py` and `prompt_lookup.py` make them, `draft_length.py` decides how many
are worth making. Verification is the sampler's, and a rejected draft needs no code at all: it stays pending, and the
next step does not accept it (`flashnext.runtime.sequence`).
"""
