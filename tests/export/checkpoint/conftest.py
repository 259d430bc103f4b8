"""Ways to make a checkpoint wrong: change its tensors, its JSON files or its bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES, map_file, read_header, tensor_view
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, write_safetensors

Array = np.ndarray[Any, Any]
Edit = Callable[[Path, Mapping[str, Array | None]], None]
EditJson = Callable[[Path, Callable[[dict[str, Any]], object]], None]
DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


@pytest.fixture(scope="session")
def single_file_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in one file, names as in the model (prefix `model.`)."""
    folder = write_random_checkpoint(tmp_path_factory.mktemp("single"), prefix="model.", shards=1, tokenizer=False)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.fixture
def checkpoint_folder(single_file_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of `single_file_checkpoint` to break."""
    return Path(shutil.copytree(single_file_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def sharded_folder(random_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of `random_checkpoint` (two shards and an index) to break."""
    return Path(shutil.copytree(random_checkpoint, tmp_path / "sharded"))


@pytest.fixture(scope="session")
def edit() -> Edit:
    """Write model.safetensors anew with some tensors replaced, added, or (None) left out."""

    def apply(folder: Path, changes: Mapping[str, Array | None]) -> None:
        file = folder / "model.safetensors"
        mapped = map_file(file)
        arrays = {name: tensor_view(mapped, info).copy() for name, info in read_header(file).items()}
        kept = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
        plan = [PlannedTensor(name, DTYPE_NAMES[a.dtype], a.shape) for name, a in kept.items()]
        write_safetensors(file, plan, lambda name: kept[name])

    return apply


@pytest.fixture(scope="session")
def edit_json() -> EditJson:
    """Change a JSON file in place."""

    def apply(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
        value = json.loads(file.read_text(encoding="utf-8"))
        change(value)
        file.write_text(json.dumps(value), encoding="utf-8")

    return apply
