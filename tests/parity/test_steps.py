"""However a text is cut into steps, its logits are those of one full forward, and nothing else leaves a trace.

Chunks of any size, ragged batches, slots in any order, reused slots, rejected tokens, empty rows, padding: each has a
test of its own here; `test_schedules.py` mixes them at random. Every model compares with its own full forward (which
`test_logits.py` compares with transformers), within 2e-5 of the deviation, or bit by bit where no rounding may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flashnext.runtime.model_runner import ModelRunner

from .configs import BY_NAME, Case
from .driver import Sequences, score
from .oracle import Array
from .references import CAPACITY, WINDOW, deviation, reference, runner_of

TOLERANCE = 2e-5
LENGTH = 110

each_model = pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "onnxruntime") for name in ("official", "block_8", "two_ngrams", "gdn_ratio_3")),
        ("two_ngrams", "torch:reference"),
    ],
)


def text(case: Case, seed: int = 0, length: int = LENGTH) -> list[int]:
    return reference(case, length, seed).tokens


def in_chunks(sequences: Sequences, slot: int, tokens: Sequence[int], size: int) -> Array:
    """Logits of a text fed `size` tokens at a time."""
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return np.concatenate([sequences.step({slot: chunk})[slot] for chunk in chunks])


@each_model
def test_chunks_of_any_size_equal_the_full_forward(name: str, engine: str) -> None:
    """Sizes 1 (decode) to 9 (one more than the window) and 64."""
    case = BY_NAME[name]
    runner, tokens = runner_of(case, engine), text(case)[:80]
    expected = score(runner, tokens)
    found = {}
    for size in (*range(1, 10), 64):
        sequences = Sequences(runner)
        sequences.start(size % 6)
        found[size] = deviation(in_chunks(sequences, size % 6, tokens, size), expected)
    print(f"{name}, {engine}: at most {max(found.values()):.1e} of the deviation")  # shown by pytest -rP
    assert max(found.values()) < TOLERANCE, found


@each_model
def test_ragged_batches_in_any_order_of_slots(name: str, engine: str) -> None:
    """Three texts in slots [5, 0, 3] of six, in steps of uneven rows, with empty rows and rows of no sequence."""
    case = BY_NAME[name]
    runner = runner_of(case, engine)
    texts = {5: text(case), 0: text(case, 1), 3: text(case, 2)}
    sequences = Sequences(runner)
    sequences.start(*texts)
    found: dict[int, list[Array]] = {slot: [] for slot in texts}
    at = dict.fromkeys(texts, 0)
    for new in [(20, 1, 3), (1, 0, 5), (0, 8, 0), (2, 2, 2), (0, 0, 64), (7, 30, 1), (40, 3, 0), (40, 66, 35)]:
        rows = {slot: texts[slot][at[slot] : at[slot] + n] for slot, n in zip(texts, new, strict=True)}
        for slot, logits in sequences.step(rows, padding_rows=2, width=max(new) + 2).items():
            found[slot].append(logits)
            at[slot] += len(rows[slot])
    for slot, tokens in texts.items():
        assert at[slot] == len(tokens)
        assert deviation(np.concatenate(found[slot]), score(runner, tokens, slot=1)) < TOLERANCE


# --- a slot's past ------------------------------


def poison(runner: ModelRunner, value: float) -> None:
    for state in runner.states.values():
        state.fill(value)


@each_model
@pytest.mark.parametrize("first", [1, 5, 64], ids=lambda n: f"first-step-{n}")
def test_reused_slot_gives_the_bits_of_a_fresh_one(name: str, engine: str, first: int) -> None:
    """Whatever the memory holds (NaN, huge values, another text), a new sequence starts from nothing."""
    case = BY_NAME[name]
    runner, tokens = runner_of(case, engine), text(case)

    def run() -> Array:
        sequences = Sequences(runner)
        sequences.start(2)
        steps = [sequences.step({2: tokens[:first]})[2]]
        return np.concatenate([*steps, in_chunks(sequences, 2, tokens[first : first + 6], 2)])

    poison(runner, 0)
    fresh = run()
    for value in (np.nan, 1e30, -1e30):
        poison(runner, value)
        assert np.array_equal(run(), fresh)
    used = Sequences(runner)
    used.start(2)
    in_chunks(used, 2, text(case, 1), 7)
    assert np.array_equal(run(), fresh)
    poison(runner, 0)


# --- rejected tokens ------------------------------


@each_model
def test_any_number_of_accepted_tokens(name: str, engine: str) -> None:
    """Every step brings W tokens, the first k of them right; k are kept, for all k from 0 to W, over and over."""
    case = BY_NAME[name]
    runner, tokens = runner_of(case, engine), text(case)
    expected = score(runner, tokens)
    sequences = Sequences(runner)
    sequences.start(4)
    sequences.step({4: tokens[:20]})
    at, kept, junk = 20, None, np.random.default_rng(0)
    for right in (*range(WINDOW + 1), *range(WINDOW, -1, -1)):
        wrong = junk.integers(0, case.text["vocab_size"], WINDOW - right).tolist()
        logits = sequences.step({4: tokens[at : at + right] + wrong}, None if kept is None else {4: kept})[4]
        assert deviation(logits[:right], expected[at : at + right]) < TOLERANCE if right else True
        at, kept = at + right, right
    rest = sequences.step({4: tokens[at : at + 3]}, {4: 0})[4]
    assert deviation(rest, expected[at : at + 3]) < TOLERANCE


@pytest.mark.parametrize("engine", ["torch:reference", "onnxruntime"])
@pytest.mark.parametrize("name", ["all_experts"])
def test_rejected_tokens_leave_no_bit_behind(name: str, engine: str) -> None:
    """Two runs that differ in rejected tokens only give the same bits ever after.

    In this configuration every token uses every expert; elsewhere the tokens beside it decide how many rows an
    expert's matrix product has, and so how it rounds.
    """
    case = BY_NAME[name]
    runner, tokens = runner_of(case, engine), text(case)
    outcomes = []
    for seed in (1, 2):
        wrong = np.random.default_rng(seed).integers(0, case.text["vocab_size"], (6, WINDOW)).tolist()
        sequences = Sequences(runner)
        sequences.start(1)
        at, logits = 21, [sequences.step({1: tokens[:21]})[1]]
        keep: dict[int, int] = {}
        for i, right in enumerate((3, 0, 8, 1, 7, 0)):
            fed = tokens[at : at + right] + wrong[i][right:]
            logits.append(sequences.step({1: fed}, keep)[1][:right])
            at, keep = at + right, {1: right}
        logits.append(sequences.step({1: tokens[at : at + 30]}, keep)[1])  # a prefill right after a rejection
        outcomes.append(np.concatenate(logits))
    assert np.array_equal(*outcomes)


# --- rows and tokens that are not there ------------------------------


def prepared(runner: ModelRunner, case: Case) -> Sequences:
    """Two sequences in slots 1 and 4, with pending tokens; zeros in all memory that they did not write."""
    poison(runner, 0)
    sequences = Sequences(runner)
    sequences.start(1, 4)
    sequences.step({1: text(case)[:19], 4: text(case, 1)[:33]})
    sequences.step({1: text(case)[19:22], 4: text(case, 1)[33:34]})
    return sequences


def slots_of(runner: ModelRunner, slots: list[int]) -> dict[str, Array]:
    return {name: state[slots].copy() for name, state in runner.states.items()}


@each_model
@pytest.mark.parametrize("width", [1, WINDOW, WINDOW + 1])
def test_empty_rows_change_nothing(name: str, engine: str, width: int) -> None:
    """A row with `new_len = 0` leaves its slot's memory bit by bit as it was; so do rows of no sequence."""
    case = BY_NAME[name]
    runner = runner_of(case, engine)
    sequences = prepared(runner, case)
    before = slots_of(runner, [0, 1, 2, 3, 5])
    sequences.step({1: [], 4: text(case, 1)[34 : 34 + width]}, padding_rows=1)
    after = slots_of(runner, [0, 1, 2, 3, 5])
    assert [key for key in before if not np.array_equal(before[key], after[key])] == []


@each_model
@pytest.mark.parametrize("width", [WINDOW, 2 * WINDOW])
def test_padding_tokens_write_nothing(name: str, engine: str, width: int) -> None:
    """What a step stores by position, it stores for its valid tokens only (and in the row that takes anything)."""
    case = BY_NAME[name]
    runner = runner_of(case, engine)
    sequences = prepared(runner, case)
    before, past, block = slots_of(runner, [1, 4]), 22, case.text["indexer_compress_ratio"]
    sequences.step({1: text(case)[past : past + 2]}, width=width)
    after = slots_of(runner, [1, 4])
    for key, state in before.items():
        assert np.array_equal(after[key][1], state[1])
        changed = set(np.flatnonzero((after[key][0] != state[0]).reshape(len(state[0]), -1).any(1)).tolist())
        kind = key.rsplit(".", 1)[-1]
        if key.startswith("mtp."):
            assert changed == set()
        elif kind in ("key_state", "value_state"):
            assert changed - {CAPACITY} == {past, past + 1}
        elif kind in ("conv_state", "index_tail_state"):
            assert changed == {p % len(state[0]) for p in (past, past + 1)}
        elif kind == "index_key_state":
            assert changed - {len(state[0]) - 1} == {p // block for p in (past, past + 1) if p % block == block - 1}
        else:
            assert kind in ("recurrent_state", "pending_state")
