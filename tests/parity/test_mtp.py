"""The draft layer equals an independent reference: first drafts, later drafts that reuse blocks, catching up.

The states fed are the oracle's (residual branches before the final Gated Residual), so that a fault of the body cannot
hide one here; `test_score_draft` goes through the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from flashnext.runtime.model_runner import ModelRunner

from .configs import BY_NAME, CASES, Case
from .mtp_reference import DraftOutput, Given, MtpReference
from .oracle import Array
from .references import bundle_of, deviation, oracle_of, reference, runner_of

TOLERANCE = 2e-4
each_case = pytest.mark.parametrize("case", [c for c in CASES if c.has_mtp], ids=lambda case: case.name)
each_engine = pytest.mark.parametrize("engine", ["torch:reference", "onnxruntime"])


@dataclass
class Drafter:
    """Feeds pairs (state, next token) to the draft layer; keeps how many positions each slot has."""

    runner: ModelRunner
    past: dict[int, int] = field(default_factory=dict)

    def first(self, rows: Mapping[int, tuple[torch.Tensor, list[int]]]) -> dict[int, tuple[Array, Array, list[int]]]:
        """A step of the layer's own choice: logits, states and chosen blocks of each slot. It is committed."""
        tokens, hidden, slots, past, new, wanted = self._arrays(rows)
        logits, states, blocks = self.runner.mtp_step(tokens, hidden, slots, past, new, wanted)
        for slot, (_, row) in rows.items():
            self.past[slot] = self.past.get(slot, 0) + len(row)
        parts = self._split(rows, logits, states)
        return {slot: (*parts[slot], blocks[i].tolist()) for i, slot in enumerate(rows)}

    def later(
        self, rows: Mapping[int, tuple[torch.Tensor, list[int]]], given: Mapping[int, Given], depth: int
    ) -> dict[int, tuple[Array, Array]]:
        """A later draft, `depth` positions after the committed ones; nothing is committed."""
        tokens, hidden, slots, past, new, wanted = self._arrays(rows)
        width = self.runner.manifest.config.budget_blocks
        blocks = np.full((len(rows), width), -1, np.int32)
        for i, slot in enumerate(rows):
            blocks[i, : len(given[slot].blocks)] = given[slot].blocks
        seen = np.array([given[slot].seen for slot in rows], np.int32)
        out = self.runner.mtp_draft(tokens, hidden, slots, past + np.int32(depth), new, blocks, seen, wanted)
        return self._split(rows, *out)

    def _arrays(self, rows: Mapping[int, tuple[torch.Tensor, list[int]]]) -> tuple[np.ndarray, ...]:
        config = self.runner.manifest.config
        new = np.array([len(tokens) for _, tokens in rows.values()], np.int32)
        width = max(1, int(new.max()))
        ids = np.full((len(rows), width), 1, np.int32)
        hidden = np.full((len(rows), width, config.hc_count, config.hidden_size), 3.0, np.float32)
        for i, (states, tokens) in enumerate(rows.values()):
            ids[i, : len(tokens)], hidden[i, : len(tokens)] = tokens, states.numpy()
        past = np.array([self.past.get(slot, 0) for slot in rows], np.int32)
        wanted = np.array([i * width + s for i, n in enumerate(new) for s in range(n)], np.int32)
        return ids, hidden, np.array(list(rows), np.int32), past, new, wanted

    @staticmethod
    def _split(
        rows: Mapping[int, tuple[torch.Tensor, list[int]]], logits: Array, states: Array
    ) -> dict[int, tuple[Array, Array]]:
        out, start = {}, 0
        for i, (slot, (_, tokens)) in enumerate(rows.items()):
            out[slot] = logits[start : start + len(tokens)], states[i, : len(tokens)]
            start += len(tokens)
        return out


def pairs(case: Case, length: int, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """The true pairs of a text: state after each position, and the token that follows."""
    text = reference(case, length + 1, seed)
    return text.hidden[:-1], text.tokens[1:]


@each_engine
@each_case
def test_draft_logits_equal_the_reference(case: Case, engine: str) -> None:
    """One step of 120 positions; then the same again in steps of 7 and 1."""
    hidden, tokens = pairs(case, 120)
    expected = MtpReference(oracle_of(case)).run(hidden, tokens)
    largest = []
    for cuts in ([], [*range(7, 84, 7), *range(84, 120)]):
        drafter, found = Drafter(runner_of(case, engine)), []
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            logits, _, blocks = drafter.first({2: (hidden[start:end], tokens[start:end])})[2]
            found.append(logits)
            assert sorted(b for b in blocks if b >= 0) == sorted(expected.blocks[end - 1])
        largest.append(deviation(np.concatenate(found), expected.logits.numpy()))
    print(f"{case.name}, {engine}: at most {max(largest):.1e} of the deviation")  # shown by pytest -rP
    assert max(largest) < TOLERANCE


@each_engine
@pytest.mark.parametrize("name", ["official", "block_8", "yarn"])
def test_later_drafts_reuse_the_first_ones_blocks(name: str, engine: str) -> None:
    """Three sequences of different lengths draft four tokens; slots in no order; one ends early, the rest close up.

    Each later draft feeds back the layer's own state and sees the first one's blocks and every token from the end of
    the last complete block then. Afterwards the true states overwrite what the drafts left.
    """
    case = BY_NAME[name]
    plain = MtpReference(oracle_of(case))
    texts = {5: pairs(case, 101), 0: pairs(case, 120, seed=1), 3: pairs(case, 86, seed=2)}
    committed = {5: 98, 0: 111, 3: 83}
    drafter = Drafter(runner_of(case, engine))
    drafter.first({slot: (hidden[: committed[slot] - 2], tokens[: committed[slot] - 2]) for slot, (hidden, tokens) in
                   texts.items()})  # fmt: skip
    last = drafter.first({slot: (hidden[(c := committed[slot]) - 2 : c], tokens[c - 2 : c]) for slot, (hidden, tokens)
                          in texts.items()})  # fmt: skip
    given = {slot: Given([b for b in blocks if b >= 0], committed[slot]) for slot, (_, _, blocks) in last.items()}
    state = {slot: torch.tensor(states[-1:]) for slot, (_, states, _) in last.items()}
    token = {slot: int(logits[-1].argmax()) for slot, (logits, _, _) in last.items()}
    fed = {slot: (hidden[: committed[slot]], tokens[: committed[slot]]) for slot, (hidden, tokens) in texts.items()}
    for depth in range(4):
        order = [0, 3, 5] if depth < 2 else [3, 5]
        rows = {slot: (state[slot], [token[slot]]) for slot in order}
        found = drafter.later(rows, given, depth)
        for slot in order:
            fed[slot] = (torch.cat([fed[slot][0], state[slot]]), [*fed[slot][1], token[slot]])
            later = range(committed[slot], len(fed[slot][1]))
            expected = plain.run(*fed[slot], dict.fromkeys(later, given[slot]))
            assert deviation(found[slot][0], expected.logits[-1:].numpy()) < TOLERANCE
            assert deviation(found[slot][1], expected.hidden[-1:].numpy()) < TOLERANCE
            state[slot], token[slot] = torch.tensor(found[slot][1]), int(expected.logits[-1].argmax())
    _assert_catches_up(plain, drafter, texts, committed)


def _assert_catches_up(
    plain: MtpReference,
    drafter: Drafter,
    texts: Mapping[int, tuple[torch.Tensor, list[int]]],
    committed: Mapping[int, int],
) -> None:
    rows = {slot: (hidden[committed[slot] :], tokens[committed[slot] :]) for slot, (hidden, tokens) in texts.items()}
    found = drafter.first(rows)
    for slot, text in texts.items():
        expected: DraftOutput = plain.run(*text)
        assert deviation(found[slot][0], expected.logits[committed[slot] :].numpy()) < TOLERANCE
        assert sorted(b for b in found[slot][2] if b >= 0) == sorted(expected.blocks[-1])


@each_engine
@pytest.mark.parametrize("name", ["official"])
def test_used_slots_and_empty_rows(name: str, engine: str) -> None:
    """A reused slot gives the bits of a fresh one whatever its memory holds; an empty row changes nothing."""
    case = BY_NAME[name]
    runner = runner_of(case, engine)
    hidden, tokens = pairs(case, 120)

    def run() -> Array:
        drafter = Drafter(runner)
        first = drafter.first({2: (hidden[:75], tokens[:75])})[2]
        given = {2: Given([b for b in first[2] if b >= 0], 75)}
        before = {key: state[2].tobytes() for key, state in runner.states.items()}
        drafter.first({2: (hidden[:0], []), 4: (hidden[:3], tokens[:3])})
        assert [key for key, bits in before.items() if runner.states[key][2].tobytes() != bits] == []
        second = drafter.later({2: (hidden[75:76], tokens[75:76])}, given, 0)[2]
        third = drafter.first({2: (hidden[75:80], tokens[75:80])})[2]
        return np.concatenate([first[0], second[0], third[0]])

    outcomes = []
    for value in (0, 1e30, np.nan, 0):
        for state in runner.states.values():
            state.fill(value)
        outcomes.append(run())
    assert all(np.array_equal(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.parametrize("name", ["official"])
def test_reuse_differs_from_a_new_choice(name: str) -> None:
    """The test above can fail: with blocks of its own choice, a later draft's logits are others."""
    case = BY_NAME[name]
    plain = MtpReference(oracle_of(case))
    hidden, tokens = pairs(case, 120)
    own = plain.run(hidden, tokens)
    reused = plain.run(hidden, tokens, {t: Given(own.blocks[109], 110) for t in range(110, 120)})
    assert deviation(reused.logits[-1:].numpy(), own.logits[-1:].numpy()) > 50 * TOLERANCE


@each_engine
@pytest.mark.parametrize("name", ["official", "ngram_first"])
def test_score_draft(name: str, engine: str) -> None:
    """Through body and draft layer: row t predicts token t + 2."""
    from flashnext.runtime import LLM

    case = BY_NAME[name]
    text = reference(case, 65)
    expected = MtpReference(oracle_of(case)).run(text.hidden[:-1], text.tokens[1:])
    (found,) = LLM(bundle_of(case), engine=engine).score_draft([text.tokens])
    assert deviation(found, expected.logits.numpy()) < TOLERANCE
