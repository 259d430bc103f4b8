"""Speculation: tokens guessed ahead and verified together in one step.

`draft.py` says what a draft is, `mtp_drafter.py` and `prompt_lookup.py` make them, `draft_length.py` decides how many
are worth making. Verification is the sampler's, and a rejected draft needs no code at all: it stays pending, and the
next step does not accept it (`flashnext.runtime.sequence`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashnext.runtime.speculation.draft import Drafter
    from flashnext.runtime.speculation.mtp_drafter import DraftLayer


def drafters_of(layer: DraftLayer) -> dict[str, Drafter]:
    """The drafters by the names that requests call them."""
    from flashnext.runtime.speculation.mtp_drafter import MtpDrafter
    from flashnext.runtime.speculation.prompt_lookup import PromptLookup

    by_layer = MtpDrafter(layer)
    return {"mtp": by_layer, "mtp-sampled": by_layer, "prompt-lookup": PromptLookup()}
