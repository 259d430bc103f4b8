"""What an export is asked for becomes definite and fits the model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from flashnext.export.checkpoint import Checkpoint, identity
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.errors import BundleError, ConfigError, ScalesError
from flashnext.export.graphs.bundle import ExportOptions, describe, fitted, with_residual
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.residual_scales import CalibrationText, ResidualScales, ResidualStorage, store_names
from flashnext.runtime.cli.main import main


def test_default_capacity_follows_a_short_context() -> None:
    """4,096 tokens are the default, but a model's own context is the limit; a capacity that was asked for is kept."""
    short = ModelConfig.from_dict(full_config({"max_position_embeddings": 1000}))
    assert fitted(ExportOptions(), short).capacity == 1000
    assert fitted(ExportOptions(capacity=64), short).capacity == 64
    assert fitted(ExportOptions(), ModelConfig.from_dict(full_config())).capacity == 4096
    with pytest.raises(ConfigError, match="1001 is outside"):
        fitted(ExportOptions(capacity=1001), short)


# --- storage of the residual ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scales(random_checkpoint: Path) -> ResidualScales:
    config = ModelConfig.from_folder(random_checkpoint)
    values = dict.fromkeys(store_names(config), (0.5,) * config.hc_count)
    text = CalibrationText("0" * 64, 1, 1, 0)
    return ResidualScales(identity(random_checkpoint), "max", "static", "e4m3", text, values)


def storage(checkpoint: Path, form: str, path: Path | None = None) -> ResidualStorage:
    return with_residual(ExportOptions(residual_form=form, scales=path), Checkpoint.open(checkpoint)).residual


def test_storage_of_the_residual(random_checkpoint: Path, scales: ResidualScales, tmp_path: Path) -> None:
    scales.write(tmp_path / "static.json")
    assert storage(random_checkpoint, "plain") == ResidualStorage()
    assert storage(random_checkpoint, "fp8-dynamic") == ResidualStorage("dynamic")
    assert storage(random_checkpoint, "fp8", tmp_path / "static.json") == ResidualStorage("static", scales.scales)
    dataclasses.replace(scales, mode="dynamic", scales={}).write(tmp_path / "dynamic.json")
    assert storage(random_checkpoint, "fp8", tmp_path / "dynamic.json") == ResidualStorage("dynamic")


@pytest.mark.parametrize(
    ("form", "given", "message"),
    [
        ("fp8", False, "--residual fp8 needs scales. Find them with: flashnext calibrate"),
        ("plain", True, "--scales is about a residual in FP8 with static scales, not --residual plain"),
        ("fp8-dynamic", True, "not --residual fp8-dynamic"),
        ("fp4", False, "--residual fp4 is not one of plain, fp8, fp8-dynamic"),
    ],
)
def test_options_that_contradict(
    random_checkpoint: Path, scales: ResidualScales, tmp_path: Path, form: str, given: bool, message: str
) -> None:
    scales.write(tmp_path / "scales.json")
    with pytest.raises(ConfigError, match=message):
        storage(random_checkpoint, form, tmp_path / "scales.json" if given else None)


def test_scales_that_do_not_fit(random_checkpoint: Path, scales: ResidualScales, tmp_path: Path) -> None:
    for wrong, message in (
        (dataclasses.replace(scales, checkpoint="f" * 64), "belongs to another checkpoint"),
        (dataclasses.replace(scales, format="e5m2"), "has scales for e5m2, but graphs and kernels store e4m3"),
        (dataclasses.replace(scales, scales={}), "the store embedding has no scales"),
    ):
        wrong.write(tmp_path / "scales.json")
        with pytest.raises(ScalesError, match=message):
            storage(random_checkpoint, "fp8", tmp_path / "scales.json")


def test_a_storage_that_does_not_fit_the_model() -> None:
    config = ModelConfig.from_dict(full_config())
    for residual, message in (
        (ResidualStorage("static"), "the store embedding has no scales"),
        (ResidualStorage("plain", {"embedding": (1.0,)}), "'embedding' is not a store of this model in plain mode"),
        (ResidualStorage("half"), "the residual's mode is 'half'"),
    ):
        with pytest.raises(ConfigError, match=f"The residual cannot be stored: {message}"):
            BuildOptions(residual=residual).check(config)


# --- a manifest of strangers ------------------------------------------------------------------------


@pytest.fixture
def fp8_bundle(random_checkpoint: Path, random_bundle: Path, scales: ResidualScales, tmp_path: Path) -> Path:
    """The manifest of an FP8 bundle; its graphs are those of another, which no manifest looks into."""
    folder = Path(shutil.copytree(random_bundle, tmp_path / "bundle"))
    checkpoint, kept = Checkpoint.open(random_checkpoint), Manifest.read(random_bundle)
    options = BuildOptions(kept.window, kept.capacity, kept.slots, residual=ResidualStorage("static", scales.scales))
    describe(checkpoint, checkpoint.config, options).write(folder)
    return folder


def test_an_fp8_manifest_comes_back(fp8_bundle: Path, scales: ResidualScales) -> None:
    manifest = Manifest.read(fp8_bundle)
    assert manifest.residual_scales == scales.scales
    assert manifest.graphs["body"].input("r").dtype == manifest.residual_dtype == "float8_e4m3fn"
    assert manifest.graphs["mtp"].input("hidden_token_scale").shape[:2] == ("B", "S")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("residual_mode", "plain", "is not a store of this model in plain mode"),
        ("residual_mode", "dynamic", "is not a store of this model in dynamic mode"),
        ("residual_mode", "odd", "the residual's mode is 'odd'"),
        ("residual_dtype", "float32", "residual_dtype is 'float32', but the mode is 'static'"),
        ("residual_scales", {}, "the store embedding has no scales"),
        ("residual_scales", {"embedding": [float("nan")]}, "is nan: a scale is above zero|has no scales|has 1 scales"),
        ("residual_scales", {"embedding": ["1"]}, "is damaged"),
        ("residual_scales", 3, "is damaged"),
    ],
)
def test_a_manifest_whose_residual_does_not_fit(fp8_bundle: Path, key: str, value: object, message: str) -> None:
    file = fp8_bundle / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(BundleError, match=message):
        Manifest.read(fp8_bundle)


def test_info_says_how_the_residual_is_kept(fp8_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(fp8_bundle)]) == 0
    assert "(float32, residual float8_e4m3fn, static scales 0.5 … 0.5)" in capsys.readouterr().out
