"""Checkpoints that are cut short while a bundle runs: an error for the requests, and the process lives.

Each case is a process of its own, which a bus error would end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines import open_engine
from flashnext.runtime.mapped_files import guard
from flashnext.runtime.ngram import HostRows

needs_handler = pytest.mark.skipif(guard.load() is None, reason="there is no handler here: no Linux, or no compiler")

RUN = """
import os, sys
from pathlib import Path
from flashnext.export.errors import CheckpointError
from flashnext.runtime import LLM, SamplingParams

bundle, checkpoint, engine, kept = sys.argv[1:5]
greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, draft_tokens=int(sys.argv[5]))
with LLM(bundle, engine, checkpoint, threads=1) as llm:
    llm.generate([[1, 2, 3]], greedy)
    free = llm._scheduler.free_slots
    first, second = llm.stream([4, 5], greedy), llm.stream([6] * 40, greedy)
    next(first), next(second)
    for file in Path(checkpoint).glob("*.safetensors"):
        os.truncate(file, int(file.stat().st_size * float(kept)))
    for request in (first, second, llm.stream([7], greedy)):
        try:
            print(list(request))
        except CheckpointError as error:
            print(error)
    try:
        llm.score([[1, 2]])
    except CheckpointError as error:
        print(error)
    assert llm._scheduler.free_slots == free
print("alive")
"""


@pytest.fixture
def checkpoint(random_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))


def run(*arguments: object, native: bool = True) -> list[str]:
    environment = {**os.environ, "FLASHNEXT_NATIVE": str(int(native))}
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    *errors, last = ended.stdout.splitlines()
    assert last == "alive"
    return errors


@pytest.mark.parametrize(
    ("engine", "kept", "drafts"), [("onnxruntime", 0.0, 0), ("onnxruntime", 0.99999, 2), ("torch:reference", 0.4, 0)]
)
@needs_handler
def test_all_requests_get_the_same_error(
    random_bundle: Path, checkpoint: Path, engine: str, kept: float, drafts: int
) -> None:
    """Those that run, the one that comes, and scores; also where only the end of a file's last page is gone."""
    errors = run(random_bundle, checkpoint, engine, kept, drafts)
    assert len(errors) == 4
    assert len(set(errors)) == 1
    assert ".safetensors has become shorter while it was in use: " in errors[0]


def test_without_native_code_a_cut_between_two_steps_is_an_error_too(random_bundle: Path, checkpoint: Path) -> None:
    errors = run(random_bundle, checkpoint, "onnxruntime", 0.0, 0, native=False)
    assert len(errors) == 4
    assert len(set(errors)) == 1
    assert "has become shorter while it was in use: 0 of " in errors[0]


@pytest.mark.parametrize("engine", ["onnxruntime", "torch:reference"])
@needs_handler
def test_a_file_that_is_cut_while_a_graph_is_opened(random_bundle: Path, checkpoint: Path, engine: str) -> None:
    """Not the engine's words about a file that ends early, and not a graph whose weights are zeros."""
    opened, manifest = Checkpoint.open(checkpoint), Manifest.read(random_bundle)
    for file in {info.file for info in opened.tensors.values()}:
        os.truncate(file, 4096)
    with pytest.raises(CheckpointError, match="has become shorter while it was in use: 4,096 of "):
        open_engine(engine, "body", random_bundle, manifest, opened, 1)


@pytest.mark.parametrize("kept", ["mapped", "huge"])
@pytest.mark.parametrize("length", [0, 4096])
def test_a_file_that_is_cut_while_its_table_is_opened(checkpoint: Path, kept: str, length: int) -> None:
    opened = Checkpoint.open(checkpoint)
    spec = opened.ngram_spec(opened.config.ngram_layers[0])
    for file in {opened.tensors[name].file for name in spec.shards}:
        os.truncate(file, length)
    with pytest.raises(CheckpointError, match=f"has become shorter while it was in use: {length:,} of "):
        HostRows.open(spec, opened, "float32", kept)


GATHER = """
import os, sys, threading
from pathlib import Path
import numpy as np
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.runtime.ngram import HostRows

checkpoint = Checkpoint.open(sys.argv[1])
spec = checkpoint.ngram_spec(checkpoint.config.ngram_layers[0])
rows = HostRows.open(spec, checkpoint, "float32", sys.argv[2])
step = (np.arange(500)[None], np.zeros((1, 2), np.int64), np.array([500]))
before = rows.rows(*step)
np.testing.assert_array_equal(HostRows.open(spec, checkpoint, "float32", "huge").rows(*step), before)
files = [checkpoint.tensors[name].file for name in spec.shards]
cutter = threading.Timer(0.05, lambda: [os.truncate(file, 0) for file in files])
cutter.start()
for _ in range(1000):
    try:
        np.testing.assert_array_equal(rows.rows(*step), before)
    except CheckpointError as error:
        print(error)
        break
"""


@pytest.mark.parametrize("kept", ["mapped", "locked"])
@pytest.mark.parametrize("native", ["0", pytest.param("1", marks=needs_handler)])
def test_a_table_that_is_cut_while_its_rows_are_gathered(checkpoint: Path, native: str, kept: str) -> None:
    """In the middle of a step or between two; numpy's rows equal native code's until then."""
    command = [sys.executable, "-c", GATHER, checkpoint, kept]
    environment = {**os.environ, "FLASHNEXT_NATIVE": native}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ".safetensors has become shorter while it was in use: 0 of " in ended.stdout
