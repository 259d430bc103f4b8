"""The trained checkpoint that ships: its size, its layout, and that transformers and this project agree on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from flashnext.calibration.training.losses import token_loss
from flashnext.calibration.training.weights import load_model
from flashnext.export.checkpoint import Checkpoint
from flashnext.runtime import LLM, SamplingParams

SMALL = Path(__file__).parents[2] / "models/small"
TEXT = (
    "No one who had ever seen Catherine Morland in her infancy would have supposed her born to be an heroine. Her "
    "situation in life, the character of her father and mother, her own person and disposition, were all equally "
    "against her. Her father was a clergyman, without being neglected, or poor, and a very respectable man, though his "
    "name was Richard--and he had never been handsome. He had a considerable independence besides two good livings--"
    "and he was not in the least addicted to locking up his daughters.\n\n"
    "Ham.\nTo be, or not to be,--that is the question:--\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles,\n"
    "And by opposing end them?--To die,--to sleep,--\nNo more; and by a sleep to say we end\n"
    "The heartache, and the thousand natural shocks\nThat flesh is heir to,--'tis a consummation\n"
    "Devoutly to be wish'd. To die,--to sleep;--\nTo sleep! perchance to dream:--ay, there's the rub;\n"
)
"""Longer than twice the indexer's budget, so that blocks have to be chosen."""


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(SMALL / "tokenizer.json")).encode(TEXT).ids
    return ids


@pytest.fixture(scope="module")
def bundle(small_bundle: Path) -> Path:
    return small_bundle


def closest_choice(tokens: list[int]) -> float:
    """Smallest difference, but for exact ties, between the worst chosen and the best other block's score."""
    with torch.no_grad():
        out = load_model(Checkpoint.open(SMALL))(torch.tensor([tokens]), draft=False)
    gaps = []
    for a in out.trace.attended:
        worst_chosen = torch.where(a.chosen, a.scores, torch.inf).amin(-1)
        gap = worst_chosen - a.scores.masked_fill(a.chosen, -torch.inf).amax(-1)
        gaps.append(gap[gap > 0].min())
    return float(torch.stack(gaps).min())


def lower_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ties in transformers' indexer, the only user of `topk` on vectors, go to the lower block as they do here."""
    topk = torch.Tensor.topk

    def stable(scores: torch.Tensor, k: int, dim: int = -1, **options: bool) -> object:
        if scores.dim() != 1:
            return topk(scores, k, dim, **options)
        values, indices = scores.sort(descending=True, stable=True)
        return torch.return_types.topk((values[:k], indices[:k]))

    monkeypatch.setattr(torch.Tensor, "topk", stable)


def test_size_and_files() -> None:
    assert sum(f.stat().st_size for f in SMALL.iterdir()) <= 10_000_000
    names = {f.name for f in SMALL.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert len(Checkpoint.open(SMALL).ngram_spec(1).shards) > 1


def test_transformers_and_this_project_give_the_same_logits(
    bundle: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(tokens) > 2 * Checkpoint.open(SMALL).config.indexer_budget
    lower_blocks_first(monkeypatch)
    assert closest_choice(tokens) > 2e-6, "a block is chosen by a hair: rounding may decide; take another text"
    transformers.logging.set_verbosity_error()
    expected = []
    for model_class in (theirs.Qwen4ExpForCausalLM, theirs.Qwen4ExpForConditionalGeneration):
        model = model_class.from_pretrained(SMALL, dtype=torch.float32).eval()
        with torch.no_grad():
            expected.append(model(torch.tensor([tokens])).logits[0].numpy())
    with LLM(bundle, threads=1) as llm:
        (found,) = llm.score([tokens])
    for logits in expected:
        assert np.abs(found - logits).max() <= 2e-4 * logits.std()


def test_it_has_learnt_something(tokens: list[int]) -> None:
    model = load_model(Checkpoint.open(SMALL))
    with torch.no_grad():
        out = model(torch.tensor([tokens]))
        loss = token_loss(out.hidden[0, :-1], model.lm_head.weight, torch.tensor(tokens[1:]))
    assert loss < 5.5  # 8.3 without training


def test_greedy_text_is_words(bundle: Path) -> None:
    with LLM(bundle, threads=1) as llm:
        (output,) = llm.generate(
            ["The river ran past the old mill, and"], SamplingParams(max_tokens=24, temperature=0.0)
        )
    assert len(output.text.split()) >= 8
    assert output.text.isascii()


@pytest.mark.parametrize(("drafter", "count"), [("mtp", 1), ("mtp", 4), ("mtp", 7), ("prompt-lookup", 5)])
def test_speculation_changes_no_text_and_keeps_drafts(bundle: Path, drafter: str, count: int) -> None:
    prompts = [TEXT, TEXT[:200], "To be, or not to be,", TEXT[300:700]]
    plain = SamplingParams(max_tokens=40, temperature=0.0)
    drafting = SamplingParams(
        max_tokens=40, temperature=0.0, draft_tokens=count, drafter=drafter, draft_adaptive=drafter == "mtp"
    )
    with LLM(bundle, threads=1) as llm:
        expected, found = llm.generate(prompts, plain), llm.generate(prompts, drafting)
    assert [o.text for o in found] == [o.text for o in expected]
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert sum(o.drafts.kept for o in found) > 0
    assert all(1 <= o.drafts.acceptance_length <= count + 1 for o in found)
