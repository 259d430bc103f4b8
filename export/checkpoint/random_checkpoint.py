"""Write a small checkpoint with random weights in the official layout: for tests, the demo and trying things out.

    python -m flashnext.export.checkpoint.random_checkpoint FOLDER [--seed 0] [--dtype bfloat16] [--quantization fp8] …

It has everything that the official one has: nested configuration, shards with an index, n-gram shards with their
constants, an MTP layer, tokenizer with chat template, generation settings. Its text is noise, but every mechanism of
the model is at work, and any two implementations have to agree on it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.checkpoint.forms import NVFP4
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.checkpoint.random_layout import Experts, WeightWriter
from flashnext.export.checkpoint.random_quantized import QUANTIZATIONS, Quantization, declaration
from flashnext.export.config import ModelConfig
from flashnext.export.errors import ConfigError, message_at_exit

WIDE_ROWS = 256
"""n-gram columns of the default model where the table is NVFP4: 16 heads of one group of 16 each."""
STORED_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_random_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any] | ModelConfig | None = None,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    scale: float = 1.0,
    experts: Experts | None = None,
    quantization: str | None = None,
    prefix: str = "model.language_model.",
    mtp: bool = True,
    vision: bool = False,
    shards: int = 2,
    tokenizer: bool = True,
    layers: int | None = None,
) -> Path:
    """Write a checkpoint into a folder (made if need be) and return the folder.

    Args:
        config: a ModelConfig, or fields that replace those of the small default model (a nested configuration's
            `text_config` is taken).
        scale: factor on all matrices.
        experts: how routed experts are stored; without it fused, or one by one in a quantized checkpoint.
        quantization: one of `random_quantized.QUANTIZATIONS`.
        vision: add a few `model.visual.*` tensors, as the official checkpoint has.
        layers: number of layers, whatever `config` says.

    Raises:
        ConfigError: fields that do not form a model, or a vocabulary too small for the built-in tokenizer.
    """
    target = Path(folder)
    quantized = QUANTIZATIONS[quantization] if quantization else Quantization()
    if config is None and quantized.table == NVFP4:
        config = {"ple_embed_dim": WIDE_ROWS}
    raw = full_config(config)
    if layers is not None:
        raw["text_config"]["num_hidden_layers"] = layers
    model = ModelConfig.from_dict(raw)
    if not mtp:
        model = model.with_overrides(mtp_num_hidden_layers=0)
    if tokenizer and model.vocab_size < random_tokenizer.SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size = {model.vocab_size} is below the {random_tokenizer.SMALLEST_VOCABULARY} of the built-in "
            "tokenizer; choose a larger one or tokenizer=False."
        )
    target.mkdir(parents=True, exist_ok=True)
    _write_configuration(target, raw, model, quantized)
    _write_json(target / "generation_config.json", _generation_config(model, tokenizer))
    if tokenizer:
        random_tokenizer.write_tokenizer(target)
    experts = experts or ("per_expert" if quantization else "fused")
    WeightWriter(model, seed, STORED_DTYPES[dtype], scale, experts, prefix, vision, quantized).write(target, shards)
    return target


def _write_configuration(target: Path, raw: dict[str, Any], model: ModelConfig, quantization: Quantization) -> None:
    if quantization.method:
        settings = declaration(quantization, model)
        if quantization.file == "config.json":
            raw = {**raw, "quantization_config": settings}
        else:
            _write_json(target / quantization.file, settings)
    _write_json(target / "config.json", raw)


def _generation_config(model: ModelConfig, tokenizer: bool) -> dict[str, Any]:
    ends = [random_tokenizer.IM_END] if tokenizer else []
    ends += [e for e in model.eos_token_id if e not in ends]
    return {"eos_token_id": ends, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@message_at_exit()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a small random checkpoint in the official layout.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(STORED_DTYPES), default="bfloat16")
    parser.add_argument("--experts", choices=("fused", "per_expert"))
    parser.add_argument("--quantization", choices=sorted(QUANTIZATIONS))
    parser.add_argument("--prefix", choices=("model.language_model.", "model."), default="model.language_model.")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (default: 8)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all matrices (default: 1)")
    parser.add_argument("--no-mtp", dest="mtp", action="store_false")
    parser.add_argument("--vision", action="store_true", help="add a few vision tensors")
    options = vars(parser.parse_args(argv))
    print(f"Wrote {write_random_checkpoint(options.pop('folder'), **options)}")


if __name__ == "__main__":
    main()
