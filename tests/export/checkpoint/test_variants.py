"""Quantized checkpoints: every variant opens to the forms that its files hold, and nothing ambiguous opens at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.dequantized import write_dequantized
from flashnext.export.checkpoint.quantization import Declared
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.number_formats import dequantize_fp8_block, dequantize_nvfp4

SIZES = {"num_hidden_layers": 4, "hidden_size": 144, "moe_intermediate_size": 160, "ple_embed_dim": 256}
"""Sizes that are not multiples of 128, and rows of 16 columns in the n-gram table."""
BODY = [f"layers.{i}" for i in range(4)]
MTP = "mtp.layers.0"
FORMS: dict[str, tuple[dict[str, str], str]] = {
    "fp8": (dict.fromkeys([*BODY, MTP], "fp8_block"), "fp8"),
    "fp8-bf16-mtp": (dict.fromkeys(BODY, "fp8_block"), "nvfp4"),
    "nvfp4": (dict.fromkeys(BODY, "nvfp4"), "fp8"),
    "nvfp4-all": (dict.fromkeys([*BODY, MTP], "nvfp4"), "nvfp4"),
    "mixed": ({"layers.1": "nvfp4", "layers.2": "fp8_block", "layers.3": "nvfp4", MTP: "fp8_block"}, "fp8"),
}
EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
Edit = Callable[[Path, Mapping[str, Any]], None]
EditJson = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def write(folder: Path, variant: str, **options: Any) -> Path:
    """A variant in one file, names with the prefix `model.`."""
    options = {"config": SIZES, "prefix": "model.", "shards": 1, "tokenizer": False, **options}
    write_random_checkpoint(folder, quantization=variant, **options)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each variant's folder, written once."""
    base = tmp_path_factory.mktemp("variants")

    def get(variant: str) -> Path:
        folder = base / variant
        return folder if folder.exists() else write(folder, variant)

    return get


@pytest.fixture
def copy(variants: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a variant, to break."""
    return lambda variant: Path(shutil.copytree(variants(variant), tmp_path / variant))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


# --- what opens ----------------------------------


@pytest.mark.parametrize("variant", FORMS)
def test_forms_are_recognised_without_remarks(variants: Callable[[str], Path], variant: str) -> None:
    notes: list[str] = []
    checkpoint = Checkpoint.open(variants(variant), notes.append)
    experts, table = FORMS[variant]
    assert (dict(checkpoint.forms.experts), checkpoint.ngram_spec(1).form) == (experts, table)
    assert notes == []


def test_twins_hold_the_same_values_in_plain_tensors(variants: Callable[[str], Path], tmp_path: Path) -> None:
    source = Checkpoint.open(variants("mixed"))
    twin = Checkpoint.open(write_dequantized(source.folder, tmp_path / "twin"))
    assert not twin.forms.experts
    assert not twin.forms.tables
    for layer, form in (("layers.1", "nvfp4"), ("layers.2", "fp8_block")):
        at = f"{layer}.mlp.experts.5.down_proj.weight"
        codes = source.array(at)
        if form == "nvfp4":
            want = dequantize_nvfp4(codes, source.array(f"{at}_scale"), source.array(f"{at}_scale_2"))
        else:
            want = dequantize_fp8_block(codes, source.array(f"{at}_scale_inv"))
        np.testing.assert_array_equal(twin.array(at), want)
    unchanged = "layers.0.mlp.experts.5.down_proj.weight"
    assert twin.array(unchanged).tobytes() == source.array(unchanged).tobytes()


@pytest.mark.parametrize("variant", ["fp8", "nvfp4", "mixed"])
def test_quantized_values_are_near_the_original_ones(
    variants: Callable[[str], Path], tmp_path: Path, variant: str
) -> None:
    twin = Checkpoint.open(write_dequantized(variants(variant), tmp_path / "twin"))
    plain = Checkpoint.open(write_random_checkpoint(tmp_path / "plain", SIZES, experts="per_expert", tokenizer=False))
    for name in ("layers.1.mlp.experts.0.up_proj.weight", "layers.2.mlp.experts.7.down_proj.weight"):
        ours, theirs = (c.array(name).astype(np.float32) for c in (twin, plain))
        assert np.abs(ours - theirs).mean() < 0.1 * theirs.std()


def test_fused_fp8(tmp_path: Path) -> None:
    sizes = {**SIZES, "moe_intermediate_size": 128}
    checkpoint = Checkpoint.open(write(tmp_path / "fused", "fp8", config=sizes, experts="fused"))
    assert checkpoint.forms.expert_form(MTP) == "fp8_block"
    assert checkpoint.expert_scales("layers.3")["gate_up_scale"] == ("layers.3.mlp.experts.gate_up_proj_scale_inv",)
    assert checkpoint.array("layers.3.mlp.experts.gate_up_proj_scale_inv").shape == (8, 2, 2)


def test_scales_of_activations_are_left_out_with_one_line(copy: Callable[[str], Path], edit: Edit) -> None:
    folder = copy("nvfp4")
    extra = (f"{EXPERT}.input_scale", f"{EXPERT.replace('gate', 'up')}.input_scale")
    edit(folder, {name: np.asarray(1, np.float32) for name in extra})
    notes: list[str] = []
    Checkpoint.open(folder, notes.append)
    assert len(notes) == 1
    assert "2 scales of activations" in notes[0]


def test_a_label_for_the_whole_checkpoint_that_is_imprecise_gives_a_remark(
    copy: Callable[[str], Path], edit_json: EditJson
) -> None:
    folder = copy("fp8-bf16-mtp")
    edit_json(folder / "config.json", lambda c: c["quantization_config"].pop("modules_to_not_convert"))
    notes: list[str] = []
    Checkpoint.open(folder, notes.append)
    assert notes == ["config.json describes mtp.layers.0.mlp.experts as fp8_block; the files hold plain and decide."]


def test_settings_may_be_absent_or_inside_the_text_configuration(
    copy: Callable[[str], Path], edit_json: EditJson
) -> None:
    folder = copy("mixed")
    edit_json(
        folder / "config.json", lambda c: c["text_config"].update(quantization_config=c.pop("quantization_config"))
    )
    notes: list[str] = []
    Checkpoint.open(folder, notes.append)
    edit_json(folder / "config.json", lambda c: c["text_config"].pop("quantization_config"))
    Checkpoint.open(folder, notes.append)
    assert notes == []


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("mtp", True), ("mtp*", True), ("*experts", True), ("*.mlp.*", True), ("mtp.layers.0.mlp", True), ("*", True),
        ("mt", False), ("*expert", False), ("mtp*layers*layers*", False), ("*gate*", False),
        ("mtp.layers.0.mlp.experts*s", False),
    ],
)  # fmt: skip
def test_patterns(pattern: str, matches: bool) -> None:
    said = Declared("config.json", "nvfp4", {}, (pattern,))
    assert said.form("mtp.layers.0.mlp.experts") == ("plain" if matches else "nvfp4", False)


# --- what does not -------------------------------


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size is [64, 64]; FP8 experts are read in blocks of"),
        ("fp8", {"weight_block_size": None}, "weight_block_size is None"),
        ("fp8", {"quant_method": "awq"}, "quant_method is 'awq'; read are fp8"),
        ("nvfp4", {"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        ("nvfp4", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; read are NVFP4"),
        ("nvfp4", {"group_size": 32}, "NVFP4 has group_size 32; only 16 is read"),
        ("nvfp4", {"ignore": "lm_head"}, "ignore must be a list of module names"),
        ("mixed", {"quantized_layers": []}, ""),
        ("mixed", {"quantized_layers": ["a"]}, "quantized_layers must map module names to objects"),
        (
            "mixed",
            {"quantized_layers": {"model.layers.1.mlp.experts": {"quant_algo": "FP8_PB_WO"}}},
            "config.json says that layers.1.mlp.experts is fp8_block, but the files hold it as nvfp4",
        ),
        (
            "mixed",
            {"quantized_layers": {f"{TABLE}": {"quant_algo": "NVFP4"}}},
            "ngram_embedding is nvfp4, but the files hold it as fp8",
        ),
    ],
)
def test_settings_that_contradict_the_files(
    copy: Callable[[str], Path], edit_json: EditJson, variant: str, change: dict[str, Any], message: str
) -> None:
    folder = copy(variant)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(change))
    if not message:
        Checkpoint.open(folder)
        return
    assert message in refused(folder)


def test_settings_in_modelopts_own_file_are_checked_too(copy: Callable[[str], Path]) -> None:
    folder = copy("nvfp4-all")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "INT4"}}))
    assert "hf_quant_config.json: quant_algo is 'INT4'" in refused(folder)
    (folder / "hf_quant_config.json").write_text("[" * 100_000)
    assert "hf_quant_config.json cannot be read as JSON" in refused(folder)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("fp8", {f"{EXPERT}.weight_scale_inv": None}, "missing: layers.1.mlp.experts.3.gate_proj.weight_scale_inv"),
        ("fp8", {f"{EXPERT}.weight_scale_inv": np.ones((1, 2), np.float32)}, "is [1, 2], expected [2, 2]"),
        ("fp8", {f"{EXPERT}.weight": np.zeros((160, 144), np.float32)}, "is F32, expected F8_E4M3"),
        ("fp8", {f"{TABLE}.weight_scale": None}, "ngram_embedding.weight_scale, expected []"),
        ("fp8", {f"{TABLE}.weight_scale": np.zeros(1, np.float32)}, "weight_scale is 0.0; a scale has to be"),
        ("nvfp4", {f"{TABLE}.weight_scale": np.float32(np.nan)}, "weight_scale is nan; a scale has to be"),
        ("nvfp4", {f"{TABLE}.weight_scale": np.float32(-0.37)}, "a finite number above zero"),
        ("nvfp4", {f"{TABLE}.weight_scale": np.ones(2, np.float32)}, "is [2], expected []"),
        ("nvfp4", {f"{EXPERT}.weight_scale_2": None}, "missing: layers.1.mlp.experts.3.gate_proj.weight_scale_2"),
        ("nvfp4", {f"{EXPERT}.weight_scale": np.ones((160, 9), np.uint8)}, "is U8, expected F8_E4M3"),
        (
            "nvfp4-all",
            {f"{TABLE}.shard_2.weight_scale": np.ones((5, 1), ml_dtypes.float8_e4m3fn)},
            "shard_2.weight_scale has 5 rows",
        ),
        ("nvfp4-all", {f"{TABLE}.shard_0.weight_scale": None}, "missing: layers.1.ple.ple_embedding"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together(
    copy: Callable[[str], Path], edit: Edit, variant: str, changes: dict[str, Any], message: str
) -> None:
    folder = copy(variant)
    edit(folder, {name: None if a is None else np.asarray(a) for name, a in changes.items()})
    assert message in refused(folder)


def test_sizes_that_a_format_cannot_hold(tmp_path: Path) -> None:
    for variant, options, message in (
        ("nvfp4", {"config": {**SIZES, "moe_intermediate_size": 40}}, "multiples of 16"),
        ("nvfp4", {"config": SIZES, "experts": "fused"}, "fused experts"),
        ("fp8", {"config": SIZES, "experts": "fused"}, "multiple of 128, not 160"),
        ("nvfp4-all", {"config": {**SIZES, "ple_embed_dim": 128}}, "rows of a multiple of 16, not 8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_random_checkpoint(tmp_path / "x", quantization=variant, tokenizer=False, **options)  # type: ignore[arg-type]
