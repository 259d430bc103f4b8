"""The rows that the decode loop asks for are those of the final text, by transformers' own n-gram module.

Texts hold eos anywhere and end where they like; prompts run in chunks, tokens one by one or with drafts of which many
are wrong, and slots are used again and again. The table's rows hold their own numbers, so a row is an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from remembering_model import RememberingModel

from flashnext.export.graphs.manifest import Manifest, NgramSpec
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import StepBatch, StepOutput
from flashnext.runtime.ngram import HostRows, RowsAhead, Upcoming
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.request import Request
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.speculation.draft import Draft, Progress

SIZE, HEADS, VOCABULARY = 3, 4, 512


def module_of(eos: int) -> Any:
    """transformers' module with a table whose rows say their number, twice (two columns)."""
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(
        vocab_size=VOCABULARY,
        ngram_size=SIZE,
        heads_per_ngram=HEADS,
        ngram_vocab_size_base=1009,
        make_ngram_vocab_size_divisible_by=8,
        eos_token_id=[eos],
    )
    module = Qwen4ExpTextNGramEmbedding(config, (SIZE - 1) * HEADS * 2, 1, 0)
    weight = module.ngram_embedding.weight
    with torch.no_grad():
        weight.copy_(torch.arange(len(weight), dtype=torch.float32)[:, None].expand_as(weight))
    return module


def rows_of(module: Any, eos: int, native: bool) -> HostRows:
    table = module.ngram_embedding.weight.detach().numpy()
    spec = NgramSpec(
        layer=1,
        input="ngram_rows.1",
        multipliers=tuple(module.layer_multipliers.tolist()),
        head_sizes=tuple(module.head_vocab_sizes),
        head_offsets=tuple(module.head_offsets),
        heads_per_ngram=HEADS,
        eos=eos,
        columns=2,
        rows=len(table),
        shards=("a", "b"),
    )
    return HostRows(spec, NgramTable(spec, np.split(table, [777]), "float32"), "float32", native=native)


class Asking(RememberingModel):
    """Asks for the rows of every step, and keeps those of each slot's text: later ones replace rejected ones."""

    def __init__(self, manifest: Manifest, rows: HostRows) -> None:
        super().__init__(manifest)
        self._rows = RowsAhead({"rows": rows})
        self.ahead = 0
        self.found: dict[int, list[np.ndarray]] = {}

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput:
        tickets, ahead = self._rows.take(Upcoming(batch.token_ids, batch.context, batch.new_len))
        self.ahead += ahead
        if upcoming is not None:
            self._rows.fetch(upcoming)
        found = tickets["rows"].wait()
        for i, slot in enumerate(batch.slots.tolist()):
            past, length = int(batch.past_len[i]), int(batch.new_len[i])
            before = self.found.get(slot, []) if past else []
            assert len(before) >= past
            self.found[slot] = [*before[:past], *found[i, :length].copy()]
        return super().step(batch)


class Guesses:
    """Drafts of which each is right with one chance in two: the model's own choice, or another token."""

    def __init__(self, model: Asking, seed: int) -> None:
        self._model, self._rng = model, np.random.default_rng(seed)

    def propose(self, rows: list[Progress]) -> None:  # type: ignore[override]
        for row in rows:
            sequence = row.request.sequence
            text = list(sequence.tokens)
            for _ in range(row.request.drafts_wanted()):
                right = int(self._model._logits(text).argmax())
                token = right if self._rng.random() < 0.5 else int(self._rng.integers(VOCABULARY))
                sequence.drafts.append(Draft(token))
                text.append(token)


def check(manifest: Manifest, tokens: int, native: bool, seed: int = 0) -> int:
    """Runs requests until so many tokens were checked; returns how many."""
    eos = manifest.config.eos_token_id[0]
    module, rng = module_of(eos), np.random.default_rng(seed)
    rows, checked = rows_of(module, eos, native), 0
    while checked < tokens:
        model = Asking(manifest, rows)
        loop = DecodeLoop(model, Scheduler(manifest.slots, manifest.window, 7), {"prompt-lookup": Guesses(model, seed)})
        requests, slots = [], {}
        for _ in range(9):
            prompt = rng.integers(0, 12, int(rng.integers(1, 40)))
            prompt[rng.random(len(prompt)) < 0.2] = eos
            room = manifest.capacity - len(prompt)
            params = SamplingParams(
                max_tokens=int(rng.integers(1, room)),
                temperature=0.0,
                ignore_eos=True,
                draft_tokens=int(rng.integers(0, manifest.window)),
                drafter="prompt-lookup",
                draft_adaptive=False,
            )
            requests.append(Request(manifest, prompt.tolist(), params, None))
            loop.add(requests[-1])
        while not all(request.done for request in requests):
            running = {r: r.sequence.slot for r in requests if r.sequence.slot is not None}
            loop.advance()
            slots |= {r: s for r, s in running.items() if r.done}
            for request in [r for r in slots if r.done]:
                checked += compare(module, request, model.found[slots.pop(request)])
        assert model.ahead > 3  # chunks of prompts
    return checked


def compare(module: Any, request: Request, found: list[np.ndarray]) -> int:
    """Every row of the text that was run, against transformers' of the whole text at once."""
    text = request.sequence.tokens[: request.sequence.past]
    expected = module(torch.tensor([text]), None).detach().numpy()[0]
    np.testing.assert_array_equal(np.stack(found[: len(text)]), expected)
    return len(text)


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_rows_are_those_of_the_final_text(make_manifest: Callable[..., Manifest], native: bool) -> None:
    assert check(make_manifest(), 1500, native) >= 1500


@pytest.mark.slow
def test_a_hundred_thousand_tokens(make_manifest: Callable[..., Manifest]) -> None:
    assert check(make_manifest(), 100_000, True, seed=1) >= 100_000
