"""`flashnext info --gpu-memory`: where things lie, whether they fit, and remedies that do make them fit."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.sparse_checkpoint import write_sparse_checkpoint
from flashnext.runtime.cli.fit import fit_facts, variant
from flashnext.runtime.cli.main import main
from flashnext.runtime.cli.parser import byte_count


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The official sizes in BF16."""
    return Checkpoint.open(write_sparse_checkpoint(tmp_path_factory.mktemp("official")))


@pytest.mark.parametrize(
    ("text", "count"),
    [("141G", 141 * 10**9), ("141 gb", 141 * 10**9), ("1.5GiB", 3 << 29), ("80Gi", 80 << 30), ("900", 900)],
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "nan", "1e9", "1I"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 141G"):
        byte_count(text)


def test_parts_of_a_byte_are_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"0.5 bytes are no whole number; name a unit, as in 0.5G"):
        byte_count("0.5")


def test_everything_has_a_place(official: Checkpoint) -> None:
    facts = fit_facts(official, 300 * 10**9, 4, 32768)
    assert facts["fits"]
    weights = sum(size for part, size in facts["device"].items() if part != "reserve" and "states" not in part)
    assert weights + sum(facts["mapped"].values()) == sum(t.length for t in official.tensors.values())
    assert facts["free_bytes"] == 300 * 10**9 - sum(facts["device"].values())
    assert 0 < sum(facts["pinned_host"].values()) < 1 << 30


def test_too_large_for_one_gpu_of_today(official: Checkpoint) -> None:
    facts = fit_facts(official, 141 * 10**9, 4, 32768)
    assert not facts["fits"]
    assert [r for r in facts["remedies"] if r.startswith("a checkpoint with experts in FP8")]
    assert not [r for r in facts["remedies"] if r.startswith("--")]


@pytest.mark.parametrize(("slots", "capacity"), [(16, 262144), (64, 65536), (1, 262144), (300, 4096)])
def test_remedies_make_it_fit_and_no_more(official: Checkpoint, slots: int, capacity: int) -> None:
    gpu = 270 * 10**9
    facts = fit_facts(official, gpu, slots, capacity)
    values = {name: int(v) for r in facts["remedies"] for name, v in re.findall(r"^--(\w+) (\d+)$", r)}
    assert facts["fits"] or values
    for name, value in values.items():
        sizes: dict[str, int] = {"slots": slots, "capacity": capacity}
        assert value < sizes[name]
        assert fit_facts(official, gpu, **{**sizes, name: value})["fits"]
        assert not fit_facts(official, gpu, **{**sizes, name: value + (1 if name == "slots" else 256)})["fits"]
    larger = [int(n) for r in facts["remedies"] for n in re.findall(r"a GPU of (\d+) GB", r)]
    assert all(fit_facts(official, n * 10**9, slots, capacity)["fits"] for n in larger)


def test_caches_in_fp8_make_it_fit_where_they_are_large(official: Checkpoint) -> None:
    offered = set()
    for gpu_gb in range(250, 400, 10):
        facts = fit_facts(official, gpu_gb * 10**9, 16, 262144)
        if not facts["fits"]:
            fits = fit_facts(official, gpu_gb * 10**9, 16, 262144, "fp8")["fits"]
            assert ("--kv-cache-dtype fp8" in facts["remedies"]) == fits
            offered.add(fits)
    assert offered == {True, False}


def test_variants_in_words(official: Checkpoint, tmp_path: Path) -> None:
    assert variant(official) == (
        "experts unquantized, fused; MTP experts unquantized; n-gram table of layer 1 unquantized"
    )
    quantized = Checkpoint.open(write_sparse_checkpoint(tmp_path, layout="fp8", layers=2))
    assert variant(quantized) == (
        "experts FP8 in blocks of 128x128, one by one; MTP experts FP8 in blocks of 128x128; "
        "n-gram table of layer 1 FP8"
    )


def test_command(official: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["info", str(official.folder), "--gpu-memory", "141G", "--slots", "2", "--capacity", "4096"]
    assert main(options) == 0
    assert "too much. Any of these would make it fit: a checkpoint with experts in FP8" in capsys.readouterr().out
    assert main([*options, "--kv-cache-dtype", "fp8"]) == 0
    assert "2 slots of 4,096 tokens (bfloat16, keys and values fp8):" in capsys.readouterr().out
    assert main([*options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["gpu"]["slots"], found["gpu"]["capacity"], found["gpu"]["fits"]) == (2, 4096, False)


def test_what_is_refused(random_checkpoint: Path, random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(random_bundle), "--gpu-memory", "141G"]) == 2
    assert "Name the checkpoint itself" in capsys.readouterr().err
    assert main(["info", str(random_bundle), "--slots", "2"]) == 2
    assert "Name the checkpoint itself" in capsys.readouterr().err
    assert main(["info", str(random_checkpoint), "--slots", "2"]) == 2
    assert "--slots is about a GPU. Name its memory with --gpu-memory 141G, or leave --slots" in capsys.readouterr().err
    assert main(["info", str(random_checkpoint), "--gpu-memory", "0"]) == 2
    assert "--gpu-memory 0 leaves nothing to lay out" in capsys.readouterr().err
    assert main(["info", str(random_checkpoint), "--gpu-memory", "141G", "--capacity", "99999"]) == 2
    assert "--capacity 99999 is outside" in capsys.readouterr().err
