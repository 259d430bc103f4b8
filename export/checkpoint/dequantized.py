"""The dequantized twin of a quantized checkpoint: the same model in plain tensors, to compare with.

    write_dequantized("checkpoint-fp8", "twin")

Codes times scales are written as F32, which holds the products exactly where a quantized graph computes in float32;
everything else is copied. For small checkpoints: the twin is four to eight times as large.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export import number_formats
from flashnext.export.checkpoint.forms import FP8, FP8_BLOCK, PLAIN, Table
from flashnext.export.checkpoint.quantization import MODELOPT_NAME
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, write_safetensors
from flashnext.export.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from flashnext.export.config import read_config

Array = np.ndarray[Any, Any]
Make = Callable[[], Array]
SCALE_ENDS = ("_scale", "_scale_inv", "_scale_2")
_DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def write_dequantized(source: str | Path, target: str | Path) -> Path:
    """Write the twin of the checkpoint `source` into the folder `target` (made if need be) and return that."""
    checkpoint, folder = Checkpoint.open(source), Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.folder.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in (INDEX_NAME, MODELOPT_NAME):
            shutil.copyfile(file, folder / file.name)
    config = {k: v for k, v in read_config(checkpoint.folder).items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    makers = dict(_tensors(checkpoint))
    arrays = ((name, make()) for name, make in makers.items())
    plan = [PlannedTensor(name, _DTYPE_NAMES[array.dtype], array.shape) for name, array in arrays]
    write_safetensors(folder / SINGLE_NAME, plan, lambda name: makers[name]())
    return folder


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Make]]:
    """Every tensor of the twin by raw name."""
    codes = {**dict(_experts(checkpoint)), **dict(_tables(checkpoint))}
    for name, info in checkpoint.tensors.items():
        if name in codes:
            yield info.raw_name.replace("weight_packed", "weight"), codes[name]
        elif not name.endswith(SCALE_ENDS):
            yield info.raw_name, partial(checkpoint.array, name)


def _experts(checkpoint: Checkpoint) -> Iterator[tuple[str, Make]]:
    for name in checkpoint.tensors:
        layer, _, rest = name.partition(".mlp.experts.")
        form = checkpoint.forms.expert_form(layer)
        if rest and form != PLAIN and not name.endswith(SCALE_ENDS):
            yield name, partial(_matrix, checkpoint, name, form)


def _matrix(checkpoint: Checkpoint, name: str, form: str) -> Array:
    codes = checkpoint.array(name)
    if form == FP8_BLOCK:
        return number_formats.dequantize_fp8_block(codes, checkpoint.array(f"{name}_scale_inv"))
    scale, scale_2 = checkpoint.array(f"{name}_scale"), checkpoint.array(f"{name}_scale_2")
    return number_formats.dequantize_nvfp4(codes, scale, scale_2.reshape(()))


def _tables(checkpoint: Checkpoint) -> Iterator[tuple[str, Make]]:
    for layer in checkpoint.config.ngram_layers:
        table = checkpoint.forms.table(layer)
        if table.form != PLAIN:
            for number, name in enumerate(table.shards):
                yield name, partial(_rows, checkpoint, table, number)


def _rows(checkpoint: Checkpoint, table: Table, number: int) -> Array:
    codes = checkpoint.array(table.shards[number])
    scale = checkpoint.array(table.scale).astype(np.float32).reshape(())
    if table.form == FP8:
        values: Array = number_formats.E4M3[number_formats.codes(codes)] * scale
        return values
    return number_formats.dequantize_nvfp4(codes, checkpoint.array(table.row_scales[number]), scale)
