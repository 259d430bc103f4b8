"""Scales of keys and values in FP8: where a checkpoint may hold them, what is refused, what the manifest says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.errors import BundleError, CheckpointError, ConfigError
from flashnext.export.graphs.bundle import ExportOptions, describe, export_bundle, with_kv_cache
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.kv_cache import KvCache, attention_layers
from flashnext.runtime.cli.main import main

Edit = Callable[[Path, dict[str, Any]], None]
LAYERS = ("layers.3", "layers.7", "mtp.layers.0")
AT = "model.layers.3.self_attn"
F32 = np.float32


Make = Callable[..., Path]


@pytest.fixture
def scaled(checkpoint_folder: Path, edit: Edit) -> Make:
    """Makes a checkpoint with these tensors beside those of the model."""

    def make(**tensors: Any) -> Path:
        edit(checkpoint_folder, {f"{AT}.{name}": np.asarray(value) for name, value in tensors.items()})
        return checkpoint_folder

    return make


@pytest.mark.parametrize(
    ("stored", "scales"),
    [
        ({}, (1.0, 1.0)),
        ({"k_scale": F32(0.5), "v_scale": np.ones(1, F32) / 4}, (0.5, 0.25)),
        ({"attn.k_scale": F32(0.5), "attn.v_scale": F32(0.25)}, (0.5, 0.25)),
        ({"k_proj.k_scale": F32(0.5), "v_proj.v_scale": F32(0.25)}, (0.5, 0.25)),
        ({"qkv_proj.k_scale": F32(0.5), "qkv_proj.v_scale": np.array(0.25, np.float16)}, (0.5, 0.25)),
        ({"kv_scale": F32(0.5)}, (0.5, 0.5)),
        ({"v_scale": F32(0.25)}, (0.25, 0.25)),
    ],
)
def test_names_that_scales_may_have(scaled: Make, stored: dict[str, Any], scales: tuple[float, float]) -> None:
    notes: list[str] = []
    opened = Checkpoint.open(scaled(**stored), notes.append)
    assert opened.scales_of_cache("layers.3") == scales
    assert opened.scales_of_cache("mtp.layers.0") == (1.0, 1.0)
    first = f"{AT}.{next(iter(stored), '')}"
    found = f"1 scale of keys and values ({first})" if len(stored) == 1 else f"2 scales of keys and values ({first}, …)"
    assert notes == [f"Found {found}, which only an export with --kv-cache-dtype fp8 uses."] * bool(stored)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"k_scale": np.ones(2, F32)}, r"k_scale of .* is \[2\] F32; an FP8 cache takes one floating-point scale"),
        ({"k_scale": np.ones(1, np.int32)}, r"is \[1\] I32; an FP8 cache takes one"),
        ({"v_proj.v_scale": F32(0)}, "is 0.0: a scale is above zero. Choose --kv-cache-dtype auto"),
        ({"v_scale": F32(np.nan)}, "is nan: a scale is above zero"),
        ({"k_scale": F32(np.inf)}, "is inf: a scale above"),
    ],
)
def test_scales_that_are_none(scaled: Make, tmp_path: Path, stored: dict[str, Any], message: str) -> None:
    """They do not matter until a cache in FP8 is asked for."""
    opened = Checkpoint.open(scaled(**stored))
    assert not with_kv_cache(ExportOptions(), opened).kv_cache.is_fp8
    with pytest.raises(CheckpointError, match=message):
        export_bundle(opened.folder, tmp_path / "bundle", ExportOptions(kv_cache_dtype="fp8"))
    assert not (tmp_path / "bundle").exists()


def test_options(single_file_checkpoint: Path) -> None:
    notes: list[str] = []
    options = with_kv_cache(ExportOptions(kv_cache_dtype="fp8"), Checkpoint.open(single_file_checkpoint), notes.append)
    assert options.kv_cache == KvCache("fp8", dict.fromkeys(LAYERS, (1.0, 1.0)))
    assert notes == ["Keys and values are stored in FP8 with scales of 1: the checkpoint has no others."]


def test_what_does_not_fit_the_model() -> None:
    config = ModelConfig.from_dict(full_config())
    assert tuple(attention_layers(config)) == LAYERS
    for cache, message in (
        (KvCache("fp4"), "--kv-cache-dtype fp4 is not one of auto, fp8"),
        (KvCache("fp8"), "there are scales for '', expected some for"),
        (KvCache("auto", {"layers.3": (1.0, 1.0)}), "there are scales for 'layers.3', expected some for"),
        (KvCache("fp8", dict.fromkeys(LAYERS, (1.0, -1.0))), "of layers.3's keys and values: a scale is above zero"),
    ):
        with pytest.raises(ConfigError, match=f"Keys and values cannot be kept: .*{message}"):
            BuildOptions(kv_cache=cache).check(config)


# --- the manifest -----------------------------------------------------------------------------------


@pytest.fixture
def manifest(single_file_checkpoint: Path, tmp_path: Path) -> Path:
    """That of a bundle with such caches, and files in place of what it names."""
    opened = Checkpoint.open(single_file_checkpoint)
    made = describe(opened, opened.config, with_kv_cache(ExportOptions(capacity=64, kv_cache_dtype="fp8"), opened))
    made.write(tmp_path)
    for file in (*(graph.file for graph in made.graphs.values()), *made.tokenizer_files):
        (tmp_path / file).touch()
    return tmp_path / "manifest.json"


def test_the_manifest_says_so(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Manifest.read(manifest.parent)
    assert (made.kv_cache_dtype, made.kv_cache_scales) == ("fp8", dict.fromkeys(LAYERS, (1.0, 1.0)))
    states = {t.name: t.dtype for g in made.graphs.values() for t in g.inputs if t.role == "state"}
    codes = {name for name, dtype in states.items() if dtype == "uint8"}
    assert codes == {f"{layer}.{name}" for layer in LAYERS for name in ("key_state", "value_state")}
    assert main(["info", str(manifest.parent)]) == 0
    assert "; keys and values fp8, scales 1 … 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kv_cache_dtype", "auto", "there are scales for"),
        ("kv_cache_dtype", "int4", "--kv-cache-dtype int4 is not one of"),
        ("kv_cache_dtype", 8, "is damaged"),
        ("kv_cache_scales", {}, "expected some for"),
        ("kv_cache_scales", {layer: [1.0, float("nan")] for layer in LAYERS}, "a scale is above zero"),
        ("kv_cache_scales", {layer: [1.0] for layer in LAYERS}, "is damaged"),
        ("kv_cache_scales", dict.fromkeys(LAYERS, "ab"), "is damaged"),
        ("kv_cache_scales", [1.0, 1.0], "is damaged"),
    ],
)
def test_a_manifest_that_does_not_fit(manifest: Path, key: str, value: object, message: str) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {key: value}))
    with pytest.raises(BundleError, match=message):
        Manifest.read(manifest.parent)
