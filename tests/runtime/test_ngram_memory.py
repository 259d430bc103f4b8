"""Kinds of memory for the n-gram table: the same rows from each, and a refusal before anything is read."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.runtime import LLM, SamplingParams, ngram_memory, weights
from flashnext.runtime.available_memory import available_memory
from flashnext.runtime.cli.main import main
from flashnext.runtime.ngram import HostRows, ids
from flashnext.runtime.ngram_core import library
from flashnext.runtime.ngram_memory import check_room, table_bytes
from flashnext.runtime.weights import load_weights

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(("kept", "cache_bytes"), [("mapped", 0), ("mapped", 1 << 16), ("locked", 0), ("huge", 0)])
def test_rows_are_the_same_wherever_the_table_is(random_checkpoint: Path, kept: str, cache_bytes: int) -> None:
    checkpoint = Checkpoint.open(random_checkpoint)
    spec = checkpoint.ngram_spec(1)
    rows = HostRows.open(spec, checkpoint, "float32", kept, cache_bytes)
    whole = np.concatenate([checkpoint.array(n) for n in spec.shards]).astype(np.float32)
    tokens = np.random.default_rng(0).integers(0, 500, (2, 300))
    context, lengths = np.full((2, 2), spec.eos), np.array([300, 200])
    for _ in range(2):  # the second time from the cache
        found = rows.rows(tokens, context, lengths).reshape(2, 300, -1, spec.columns)
        wanted = whole[ids(spec, tokens, context)]
        wanted[1, 200:] = 0
        np.testing.assert_array_equal(found, wanted)
    counts = rows.counts()
    assert counts.rows == 2 * 500 * len(spec.head_sizes)
    assert counts.bytes == counts.rows * rows.table.row_bytes
    assert counts.missing <= counts.rows
    mapped = np.shares_memory(rows.table.shards[0], checkpoint.array(spec.shards[0]))
    assert mapped == (kept != "huge")
    if kept == "huge":  # one piece, for a kernel
        shards = rows.table.shards
        ends = [s.ctypes.data + s.nbytes for s in shards[:-1]]
        assert ends == [s.ctypes.data for s in shards[1:]]
    rows.close()


def test_a_copy_lies_in_huge_pages_as_far_as_the_system_has_them() -> None:
    array = ngram_memory._huge_array((3 << 20, 2), np.dtype(np.uint16))
    assert array.ctypes.data % ngram_memory.HUGE_PAGE == 0
    array[:] = 1
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in (enabled.read_text() if enabled.exists() else "[never]"):
        pytest.skip("this system has no transparent huge pages")
    area = next(block for block in _areas() if block.start <= array.ctypes.data < block.stop)
    assert area.step == 1  # advised: the flag "hg" is set


def _areas() -> list[range]:
    """Mappings of this process; the step is 1 where huge pages are advised, else 2."""
    areas: list[range] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:":
            areas.append(range(begin, end, 1 if " hg" in line else 2))
    return areas


def test_what_does_not_fit_is_refused_before_it_is_read(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = table_bytes([Checkpoint.open(_checkpoint_of(random_bundle)).ngram_spec(1)], _open(random_bundle))
    assert needed > 0
    monkeypatch.setattr(ngram_memory, "available_memory", lambda: needed // 2)
    for kept in ("locked", "huge"):
        with pytest.raises(RequestError, match=rf'ngram_table = "{kept}" needs .* GB of memory for good'):
            LLM(random_bundle, threads=1, ngram_table=kept)
    assert main(["run", str(random_bundle), "--token-ids", "1", "--ngram-table", "huge"]) == 2
    assert 'Keep the table in its files (ngram_table = "mapped")' in capsys.readouterr().err
    check_room("mapped", needed)
    with pytest.raises(RequestError, match="cache of rows"):
        check_room("mapped", needed, cache_bytes=needed)
    with pytest.raises(RequestError, match='with ngram_table = "huge" all of it is in memory'):
        check_room("huge", 1, cache_bytes=1)
    monkeypatch.undo()
    with pytest.raises(RequestError, match=r"ngram_cache_bytes = 10 for a table: its rows of \d+ bytes need at least"):
        LLM(random_bundle, threads=1, ngram_cache_bytes=10)
    monkeypatch.setattr(library, "load", lambda: None)
    with pytest.raises(RequestError, match="ngram_cache_bytes needs native code"):
        LLM(random_bundle, threads=1, ngram_cache_bytes=1 << 20)


def _checkpoint_of(bundle: Path) -> Path:
    return Path(Manifest.read(bundle).checkpoint.path)


def _open(bundle: Path) -> Checkpoint:
    return Checkpoint.open(_checkpoint_of(bundle))


@pytest.mark.parametrize("scarce", [False, True])
def test_weights_leave_the_page_cache_to_the_table_where_memory_is_scarce(
    random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, scarce: bool
) -> None:
    checkpoint = Checkpoint.open(random_checkpoint)
    table = table_bytes([checkpoint.ngram_spec(1)], checkpoint)
    spec = WeightSpec("embed", "float32", checkpoint.tensors["embed_tokens.weight"].shape, ("embed_tokens.weight",))
    read = checkpoint.tensors["embed_tokens.weight"].length
    room = table + read + 2 * read  # and the weight itself, in float32
    monkeypatch.setattr(ngram_memory, "available_memory", lambda: room - scarce)
    asked: list[bool] = []
    monkeypatch.setattr(weights, "read_into_place", lambda *_, keep_cached: asked.append(keep_cached))
    load_weights(Weights(weights=(spec,)), checkpoint)  # type: ignore[arg-type]
    assert asked == [not scarce]


@dataclass
class Weights:
    """What `load_weights` takes of a manifest."""

    weights: tuple[WeightSpec, ...]


def test_unknown_kinds_and_pinned_memory_without_a_gpu(random_bundle: Path) -> None:
    with pytest.raises(RequestError, match="ngram_table = 'ram' is not one of mapped, locked, huge, pinned"):
        LLM(random_bundle, ngram_table="ram")
    with pytest.raises(RequestError, match="ngram_cache_bytes = -1"):
        LLM(random_bundle, ngram_cache_bytes=-1)
    try:
        ngram_memory._gpu()
    except EngineError:
        with pytest.raises(EngineError, match=r'ngram_table = "pinned" .*"huge"'):
            LLM(random_bundle, ngram_table="pinned")


def test_a_text_does_not_depend_on_where_the_table_is(random_bundle: Path) -> None:
    texts = []
    for options in ({}, {"ngram_table": "huge"}, {"ngram_cache_bytes": 1 << 20}):
        with LLM(random_bundle, threads=1, prefill_chunk=16, **options) as llm:  # type: ignore[arg-type]
            texts.append(llm.generate([list(range(1, 60))], GREEDY)[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_pages_that_a_user_may_not_ask_about(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(mmap.PAGESIZE))
    assert ngram_memory._tells_pages(file)


# --- what is available --------------------------------------------------------------------------------


def system(root: Path, files: dict[str, str]) -> int:
    for name, text in {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_memory(root)


def test_the_machines_memory_without_groups(tmp_path: Path) -> None:
    assert system(tmp_path, {}) == 800 * 1024
    assert available_memory() > 0


def test_groups_of_version_2_with_those_above(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/memory.max": "300000\n",
        "sys/fs/cgroup/a/memory.current": "120000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 10000\nactive_file 5000\n",
    }
    assert system(tmp_path, groups) == 300000 - 120000 + 15000


def test_groups_of_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    groups = {
        "proc/self/cgroup": "5:cpu:/other\n3:memory:/box\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "200000\n",
        f"{folder}/memory.usage_in_bytes": "250000\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 60000\ntotal_active_file 40000\n",
    }
    assert system(tmp_path, groups) == 200000 - 250000 + 100000
