"""The oracle is worth comparing with: every tensor matters, gates and choices are spread, files are official.

A parity test passes easily where a gate is stuck or a branch adds nothing. These tests fail if the random weights ever
come to hide a part of the model.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from .configs import BY_NAME, CASES, Case
from .oracle import Oracle
from .references import oracle_of, reference

TOLERANCE = 2e-4
"""What the parity tests allow, relative to the deviation of the logits."""

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_at_least_fourteen_configurations_with_names_of_their_own() -> None:
    assert len(CASES) == len(BY_NAME) >= 14


@pytest.mark.parametrize("name", ["two_ngrams", "qsa_only"])
def test_every_tensor_matters(name: str) -> None:
    """Replacing any tensor by zeros moves some logit by a hundred times the tolerance."""
    oracle = Oracle(BY_NAME[name])
    tokens = oracle.text(100)
    expected = oracle.logits(tokens)
    unnoticed = []
    for parameter_name, parameter in oracle.model.named_parameters():
        kept = parameter.data.clone()
        parameter.data.zero_()
        if np.abs(oracle.logits(tokens) - expected).max() < 100 * TOLERANCE * expected.std():
            unnoticed.append(parameter_name)
        parameter.data.copy_(kept)
    assert not unnoticed


@each_case
def test_gates_are_spread(case: Case) -> None:
    """Read gates fill (0, 1) and write gates (0, 2): neither constant nor saturated."""
    oracle = Oracle(case)
    seen = defaultdict(list)

    def record(mixer: Any, args: tuple[torch.Tensor], out: Any) -> None:
        low = torch.nn.functional.silu(mixer.input_mix_weight_down(mixer.hc_norm(args[0])) / mixer.hc_count)
        seen["read"].append(torch.sigmoid(mixer.input_mix_weight_up(low)).flatten())
        if mixer.block_inject_weight is not None:
            seen["write"].append(out[2].flatten() / 2)

    for module in oracle.text_model.modules():
        if isinstance(module, theirs.Qwen4ExpTextGatedResidual):
            module.register_forward_hook(record)
    oracle.logits(oracle.text(40))
    for gates in seen.values():
        low, middle, high = torch.cat(gates).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        assert 0.02 < low < 0.3 < middle < 0.7 < high < 0.98


@each_case
def test_selection_is_active_and_clear(case: Case) -> None:
    """In 700 tokens blocks are left out (unless the budget holds them all), and no choice is a matter of rounding."""
    model = oracle_of(case)
    model.forward(reference(case, 700).tokens)
    assert model.decisions.first_unclear() is None
    leaves_out = "Q" in pattern(case) and case.name != "budget_above_length"
    assert bool(model.decisions.block_choices) == leaves_out


def pattern(case: Case) -> str:
    return "".join("G" if t == "linear_attention" else "Q" for t in case.text["layer_types"])


@pytest.mark.parametrize("name", ["official", "block_8", "tied", "two_ngrams"])
def test_checkpoint_is_official(name: str, tmp_path: Path) -> None:
    """`from_pretrained` on our files gives the same model, and `save_pretrained` the same names of n-gram shards."""
    oracle = Oracle(BY_NAME[name])
    oracle.save(tmp_path / "ours")
    model, info = type(oracle.model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = oracle.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs_ = tensor_shapes(tmp_path / "ours"), tensor_shapes(tmp_path / "theirs")
    assert {k: v for k, v in ours.items() if "ngram" in k} == {k: v for k, v in theirs_.items() if "ngram" in k}


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes
