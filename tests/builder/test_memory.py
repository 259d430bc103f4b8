"""What a build is estimated to take, and what is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.builder import memory
from flashnext.builder.memory import Estimate
from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import Manifest


def test_device_memory_is_what_a_step_binds(tiny_bundle: Path) -> None:
    manifest = Manifest.read(tiny_bundle)
    spec, sizes = manifest.graphs["body"], {"B": 2, "S": 2, "N": 4}
    few = memory.estimate(spec, 0, 5, sizes).device
    more = memory.estimate(spec, 0, 5, {**sizes, "N": 5}).device
    assert more - few == 4 * manifest.config.vocab_size + 4  # a row of logits, and its number
    assert memory.estimate(spec, 1000, 5, sizes).device == few + 1000
    c = manifest.config
    gathered = memory.with_gathered(Estimate(0, 0, few), manifest, sizes).device - few
    assert gathered == 2 * 2 * c.num_experts_per_tok * 3 * c.moe_intermediate_size * c.hidden_size * 4


def test_host_memory_grows_with_weights_and_nodes(tiny_bundle: Path) -> None:
    spec, sizes = Manifest.read(tiny_bundle).graphs["body"], {"B": 1, "S": 1, "N": 1}
    base = memory.estimate(spec, 0, 0, sizes)
    assert memory.estimate(spec, 1 << 30, 0, sizes).host - base.host == 3 << 30
    assert memory.estimate(spec, 0, 10, sizes).host > base.host
    assert memory.estimate(spec, 1 << 30, 0, sizes).disk - base.disk == 1 << 30


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._group_limit(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory._group_limit(str(tmp_path)) == 4000


def test_a_full_disk_is_told_before_the_build(tmp_path: Path) -> None:
    memory.check_disk(tmp_path, 0)
    with pytest.raises(BuildError, match=r"take about 1,000,000,000\.0 GB"):
        memory.check_disk(tmp_path, 10**18)


def test_a_full_gpu_is_told_before_the_build() -> None:
    memory.check_device("H200", 10, 10)
    with pytest.raises(BuildError, match=r"at least 100\.0 GB on the GPU, and H200 has 80\.0 GB free"):
        memory.check_device("H200", 100 * 10**9, 80 * 10**9)
