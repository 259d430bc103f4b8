"""How many drafted tokens are kept, greedily: speculation replayed on a text that the model itself wrote.

Greedy speculation gives the greedy text, whatever the drafts. So the text is generated once, the body's states are
taken from one pass over it, and each round drafts from the true states up to where it stands, exactly as a decoder
would: catch up on the kept tokens, then feed the draft layer its own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.scoring import chunks

Floats = NDArray[np.float32]
SLOT = 0


def acceptance_lengths(bundle: Path, prompts: Sequence[Sequence[int]], new_tokens: int, most: int = 4) -> list[float]:
    """Tokens per round for 1, 2, … `most` drafts: the kept drafts and the one token that a round always gives."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    with LLM(bundle, threads=1) as llm:
        outputs = llm.generate([list(p) for p in prompts], params)
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, outputs, strict=True)]
    runner, rounds = ModelRunner.open(bundle, threads=1), np.zeros((most, 2))
    for prompt, text in zip(prompts, texts, strict=True):
        hidden = _states(runner, text)
        for drafts in range(1, most + 1):
            rounds[drafts - 1] += _replay(runner, text, hidden, len(prompt), drafts)
    runner.close()
    return [float(tokens / count) for tokens, count in rounds]


def _states(runner: ModelRunner, text: Sequence[int]) -> Floats:
    """The body's branches after every token, [1, T, n, H]."""
    steps = chunks(runner, SLOT, text, 512, all_logits=False)
    return np.concatenate([np.asarray(step.hidden, np.float32) for _, step in steps], axis=1)


def _replay(runner: ModelRunner, text: Sequence[int], hidden: Floats, prompt: int, drafts: int) -> tuple[int, int]:
    """Tokens gained and rounds needed from the prompt's end to the text's."""
    fed, known, rounds = 0, prompt + 1, 0
    while known + drafts < len(text):
        guesses = _draft(runner, text[:known], hidden[:, : known - 1], fed, drafts)
        kept = 0
        while kept < drafts and guesses[kept] == text[known + kept]:
            kept += 1
        fed, known, rounds = known - 1, known + kept + 1, rounds + 1
    return known - prompt - 1, rounds


def _draft(runner: ModelRunner, known: Sequence[int], hidden: Floats, fed: int, drafts: int) -> list[int]:
    """Guesses of the tokens after `known`; the draft layer has seen `fed` positions with their true states."""
    slots, new = np.array([SLOT], np.int32), len(known) - 1 - fed
    logits, states, blocks = runner.mtp_step(
        token_ids=np.array([known[fed + 1 :]], np.int32),
        hidden=hidden[:, fed:],
        slots=slots,
        past_len=np.array([fed], np.int32),
        new_len=np.array([new], np.int32),
        logit_rows=np.array([new - 1], np.int32),
    )
    seen, state, guesses = fed + new, states[:, -1:], [int(logits[0].argmax())]
    for more in range(drafts - 1):
        logits, state = runner.mtp_draft(
            token_ids=np.array([[guesses[-1]]], np.int32),
            hidden=state,
            slots=slots,
            past_len=np.array([seen + more], np.int32),
            new_len=np.array([1], np.int32),
            blocks=blocks,
            blocks_len=np.array([seen], np.int32),
            logit_rows=np.array([0], np.int32),
        )
        guesses.append(int(logits[0].argmax()))
    return guesses
