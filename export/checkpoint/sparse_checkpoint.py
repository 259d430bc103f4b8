"""Write a checkpoint of the official sizes whose weights are holes in files: 360 GB to look at, megabytes on the disk.

    python -m flashnext.export.checkpoint.sparse_checkpoint FOLDER [--layout bf16] [--layers 48]

Everything that reads headers and not weights (export, info, identity) works on it at full size, on any machine with a
file system that knows sparse files. Reading a hole gives zeros; what must not be zero (hash constants of the n-gram
table, quantization scales) is really there. Never copy such a folder with a tool that fills holes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.checkpoint.official_config import OFFICIAL_TEXT_CONFIG
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.checkpoint.random_layout import Experts, WeightWriter
from flashnext.export.checkpoint.random_quantized import QUANTIZATIONS, Quantization, declaration
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, Values, write_safetensors
from flashnext.export.config import ModelConfig
from flashnext.export.errors import message_at_exit

LAYOUTS: dict[str, tuple[Experts, Quantization]] = {
    "bf16": ("fused", Quantization()),
    "bf16-per-expert": ("per_expert", Quantization()),
    "fp8": ("per_expert", QUANTIZATIONS["fp8"]),
}
"""Layouts of releases by name: how each stores the routed experts, and how it is quantized."""
SHARDS = 48
"""About 7.5 GB each, as releases of this size come."""
SCALE = 0.5
"""Value of every quantization scale: any positive one does."""


def write_sparse_checkpoint(
    folder: str | Path,
    *,
    layout: str = "bf16",
    layers: int | None = None,
    shards: int = SHARDS,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of the official configuration (of `layers` layers) without its weights' bytes.

    `fields` replace some of the configuration's.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    count = layers or OFFICIAL_TEXT_CONFIG["num_hidden_layers"]
    raw = full_config({**OFFICIAL_TEXT_CONFIG, "num_hidden_layers": count, **(fields or {})})
    model = ModelConfig.from_dict(raw)
    experts, quantization = LAYOUTS[layout]
    if quantization.method:
        raw["quantization_config"] = declaration(quantization, model)
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    writer = WeightWriter(model, 0, "BF16", 1.0, experts, "model.language_model.", False, quantization)
    writer.write(target, shards, write_with_holes)
    return target


def write_with_holes(path: Path, plan: Sequence[PlannedTensor], values: Values) -> None:
    """Like `write_safetensors`, with bytes only for tensors that no reader takes as zeros."""
    planned = {tensor.name: tensor for tensor in plan}

    def value(name: str) -> np.ndarray[Any, Any] | None:
        tensor = planned[name]
        if tensor.dtype == "I64":
            return values(name)
        return np.full(tensor.shape, SCALE, NUMPY_DTYPES[tensor.dtype]) if "weight_scale" in name else None

    write_safetensors(path, plan, value)


@message_at_exit()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of the official sizes as sparse files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="bf16")
    parser.add_argument("--layers", type=int, help="another number of layers than the official 48")
    options = vars(parser.parse_args(argv))
    folder = write_sparse_checkpoint(options.pop("folder"), **options)
    sizes = [f.stat() for f in folder.iterdir()]
    apparent, real = sum(s.st_size for s in sizes), sum(s.st_blocks * 512 for s in sizes)
    print(f"Wrote {folder}: {apparent / 1e9:,.1f} GB apparent, {real / 1e6:,.1f} MB on the disk")


if __name__ == "__main__":
    main()
