"""The benchmarks of the kernels run here at small sizes on the host execution, every line but those of a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import kernel_times
import kernel_traffic
import pytest
import torch
from kernel_launches import CONFIGS, MAKERS, Step, make
from timing_backends import Device, Host

from flashnext.export.errors import EngineError

Captured = pytest.CaptureFixture[str]


def last_line(capsys: Captured) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("op", MAKERS)
def test_bytes_are_those_of_the_buffers_at_most(op: str) -> None:
    """What a launch touches lies in its tensors, each of which is as long as the official model makes it."""
    launch = make("small", op, Step(2, 4, 40), torch.device("cpu"))
    held = sum(v.nbytes for v in launch.values.values() if isinstance(v, torch.Tensor))
    assert 0 < launch.touched <= held
    assert launch.touched <= launch.moved


@pytest.mark.parametrize("step", ["decode", "verification of 4"])
def test_traffic_is_counted(capsys: Captured, step: str) -> None:
    """Every kernel touches what it needs, so that "needed" is not too much."""
    assert kernel_traffic.main(["--sizes", "small", "--step", step]) == 0
    rows = last_line(capsys)["rows"]
    assert {row["op"] for row in rows} == set(MAKERS)
    assert all(row["share"] >= 1 and row["launches"] >= 1 for row in rows)


def test_launches_of_a_layer_are_few(capsys: Captured) -> None:
    kernel_traffic.main(["--sizes", "small", "--step", "decode"])
    lines = capsys.readouterr().out.splitlines()
    found = {
        line.split("|")[1].strip(): int(line.split("|")[2]) for line in lines if line.startswith(("| GDN", "| QSA"))
    }
    assert found["GDN layer"] <= 8
    assert found["QSA layer"] <= 12


def test_a_model_s_decode_step_is_summed(capsys: Captured, tmp_path: Path) -> None:
    output = tmp_path / "times.json"
    arguments = ["--on", "host", "--sizes", "small", "--output", str(output)]
    assert kernel_times.main([*arguments, "--case", "batch 1, 1 tokens"]) == 0
    found = last_line(capsys)
    assert json.loads(output.read_text()) == found
    times = {name: result["us"] for name, result in found["times"].items()}
    assert all(us > 0 for us in times.values())
    for state in ("bf16", "fp8"):
        rows, total = kernel_times.model_sum(
            "small", {n: kernel_times.Result(**r) for n, r in found["times"].items()}, state
        )
        assert total == found["decode_ms"][f"{state} residual"]
        assert total == pytest.approx(sum(count * times[name] for name, count, _ in rows) / 1e3, abs=1e-3)
        counts = {name.split(",")[0]: count for name, count, _ in rows}
        assert counts["gated_residual"] == 2 * CONFIGS["small"].num_hidden_layers + 1


def test_the_official_model_s_parts() -> None:
    counts = {case.op: count for count, case in kernel_times.model_cases("official")}
    assert counts["gated_delta_net"] == counts["dense of a GDN layer"] == 36
    assert counts["sparse_attention"] == counts["dense of a QSA layer"] == 12
    assert (counts["gated_residual"], counts["sparse_moe"], counts["ngram_injection"]) == (97, 48, 1)


def test_every_wanted_size_is_a_case() -> None:
    cases = kernel_times.all_cases("official")
    for op in ("gated_residual", "gated_delta_net", "sparse_moe"):
        steps = {(c.step.batch, c.step.steps) for c in cases if c.op == op}
        assert steps == {(1, 1), (1, 4), (8, 1), (8, 4), (1, 2048), (1, 8192)}
    ends = {c.step.past + c.step.steps for c in cases if c.op == "sparse_attention" and c.step.steps in (1, 4)}
    assert {8192, 65536, 262144, 1048576} <= ends
    assert len({case.name for case in cases}) == len(cases)


def test_what_the_budget_does_not_allow_is_named(capsys: Captured) -> None:
    kernel_times.main(["--on", "host", "--sizes", "small", "--budget", "-1"])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["left_out"] == [case.name for case in kernel_times.all_cases("small")]
    assert found["decode_ms"] == {"bf16 residual": None, "fp8 residual": None}
    assert "not all measured" in out


def test_buffers_are_many_and_different(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, seen = Host(), []
    monkeypatch.setattr(kernel_times, "make_work", lambda *arguments: seen.append(arguments[-1]) or _work())
    monkeypatch.setattr(backend, "most_copies", 5)
    result = kernel_times.measure(backend, "small", kernel_times.Case("candidates", Step(1, 1)), 1e9)
    assert seen == [0, 1, 2, 3, 4]
    assert result.us > 0
    assert not math.isnan(result.share)


def _work() -> kernel_times.Work:
    return kernel_times.Work(lambda: sum(range(1000)), 100, 100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(EngineError, match="--on host"):
        Device()
