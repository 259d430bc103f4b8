"""The file of scales: names of the stores, writing, and everything that a strange file may hold."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnext.export.config import ModelConfig
from flashnext.export.errors import ScalesError
from flashnext.export.residual_scales import CalibrationText, ResidualScales, last_store, read_scales, store_names

IDENTITY = "0123456789abcdef" * 4
CONFIG = ModelConfig.from_folder(Path(__file__).parents[2] / "models/small")


def scales(config: ModelConfig = CONFIG, **changes: Any) -> ResidualScales:
    random = np.random.default_rng(0)
    made = {name: tuple(random.uniform(0.01, 1, config.hc_count).astype("f4").tolist()) for name in store_names(config)}
    text = CalibrationText("ab" * 32, 64, 512, 7)
    return dataclasses.replace(ResidualScales(IDENTITY, "max", "static", "e4m3", text, made, "test"), **changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    scales().write(tmp_path / "scales.json")
    return tmp_path / "scales.json"


def test_comes_back(file: Path) -> None:
    assert read_scales(file, CONFIG, IDENTITY) == scales()
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_dynamic_mode_has_no_scales(file: Path) -> None:
    scales(mode="dynamic", scales={}).write(file)
    assert read_scales(file, CONFIG, IDENTITY).mode == "dynamic"
    scales(mode="dynamic").write(file)
    with pytest.raises(ScalesError, match="is not a store of this model in dynamic mode"):
        read_scales(file, CONFIG, IDENTITY)


def test_names_of_stores() -> None:
    assert CONFIG.ngram_layers == (1,)
    names = store_names(CONFIG)
    assert names[:4] == ("embedding", "layers.0.mixer", "layers.1.ngram", "layers.1.mixer")
    assert names[-4:] == ("layers.7.mlp", "mtp.layers.0.input", "mtp.layers.0.mixer", "mtp.layers.0.mlp")
    assert last_store(CONFIG) == "layers.7.mlp"
    assert len(names) == len(set(names)) == 2 * CONFIG.num_hidden_layers + 1 + 3
    first = CONFIG.with_overrides(ple_layer_ids=(1,))
    assert store_names(first)[:3] == ("layers.0.ngram", "layers.0.mixer", "layers.0.mlp")
    plain = CONFIG.with_overrides(ple_layer_ids=(), mtp_num_hidden_layers=0)
    assert store_names(plain)[:4] == ("embedding", "layers.0.mixer", "layers.0.mlp", "layers.1.mixer")


def changed(file: Path, **changes: Any) -> None:
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | changes))


def test_another_checkpoint(file: Path) -> None:
    with pytest.raises(ScalesError, match=r"scales.json belongs to another checkpoint .*flashnext calibrate"):
        read_scales(file, CONFIG, "f" * 64)


def test_another_model(file: Path) -> None:
    wider = CONFIG.with_overrides(hc_count=3)
    with pytest.raises(ScalesError, match=r"the store embedding has 4 scales, the model 3 branches \(\d+ faults"):
        read_scales(file, wider, IDENTITY)
    deeper = CONFIG.with_overrides(num_hidden_layers=9, layer_types=(*CONFIG.layer_types, "linear_attention"))
    with pytest.raises(ScalesError, match=r"the store layers.8.mixer has no scales"):
        read_scales(file, deeper, IDENTITY)


def test_an_unknown_store(file: Path) -> None:
    changed(file, scales=json.loads(file.read_text())["scales"] | {"layers.0.mlp": [1.0] * 4})
    with pytest.raises(ScalesError, match=r"'layers.0.mlp' is not a store of this model"):
        read_scales(file, CONFIG, IDENTITY)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("NaN", "is nan: a scale is above zero"),
        ("0", "is 0.0: a scale is above zero"),
        ("-0.5", "is -0.5: a scale is above zero"),
        ("1e-39", "loses bits"),
        ("1e-400", "is 0.0: a scale is above zero"),
        ("Infinity", "stands for infinite values"),
        ("1e37", "stands for infinite values"),
        ("1e400", "stands for infinite values"),
        ("9" * 400, "stands for infinite values"),
        ("-" + "9" * 400, "is -inf: a scale is above zero"),
        ("-1e400", "is -inf: a scale is above zero"),
        ("true", "has the scale True, expected a number"),
        ('"1"', "has the scale '1', expected a number"),
        ("null", "has the scale None, expected a number"),
        ("[1.0]", r"has the scale \[1.0\], expected a number"),
    ],
)
def test_values_that_are_no_scales(file: Path, value: str, message: str) -> None:
    raw = json.loads(file.read_text())
    raw["scales"]["layers.3.mixer"][2] = "HERE"
    file.write_text(json.dumps(raw).replace('"HERE"', value))
    with pytest.raises(ScalesError, match=message + ".*flashnext calibrate"):
        read_scales(file, CONFIG, IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "has format version 2, this release reads 1"),
        ({"format_version": True}, "has format version True"),
        ({"format_version": None}, "has format version None"),
        ({"format": "e3m4"}, "format is 'e3m4', expected one of e4m3, e5m2"),
        ({"mode": "both"}, "mode is 'both'"),
        ({"method": 3}, "method must be a short text, found 3"),
        ({"checkpoint": "a\nb"}, "checkpoint must be a short text"),
        ({"scales": [1]}, r"scales must be an object, found \[1\]"),
        ({"scales": {"embedding": 1.0}}, "'embedding' must have a list of scales, found 1.0"),
        ({"scales": {}}, "the store embedding has no scales"),
        ({"text": None}, "text must be an object"),
        ({"text": {"sha256": "ab", "sequences": "many"}}, "sequences must be an integer, found 'many'"),
        ({"text": {"sha256": 1}}, "sha256 must be a short text"),
    ],
)
def test_other_contents(file: Path, changes: dict[str, Any], message: str) -> None:
    changed(file, **changes)
    with pytest.raises(ScalesError, match=message):
        read_scales(file, CONFIG, IDENTITY)


def test_files_that_are_none(file: Path) -> None:
    content = file.read_text()
    for text, message in (
        (content[: len(content) // 2], "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[1]", "holds a JSON list, expected an object"),
        ('{"scales": 1, "scales": 2}', "duplicate key"),
        ("[" * 100_000, "cannot be read as JSON"),
        (" " * (5 << 20), "more than the 4,194,304"),
    ):
        file.write_text(text)
        with pytest.raises(ScalesError, match=message):
            read_scales(file, CONFIG, IDENTITY)
    with pytest.raises(ScalesError, match=r"absent.json does not exist; expected a file of scales"):
        read_scales(file.with_name("absent.json"), CONFIG, IDENTITY)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ScalesError, match="cannot be written"):
        scales().write(tmp_path / "absent" / "scales.json")
    long = tmp_path / ("x" * 250)  # a name by itself, but not with what is added while it is written
    with pytest.raises(ScalesError, match=f"^{re.escape(str(long))} cannot be written .File name too long"):
        scales().write(long)


def test_only_scales_are_replaced(file: Path) -> None:
    scales(method="max").write(file)
    assert read_scales(file, CONFIG, IDENTITY).method == "max"
    text, pipe = file.with_name("text.jsonl"), file.with_name("pipe")
    text.write_text("[1, 2]\n")
    os.mkfifo(pipe)
    for other in (text, pipe, file.parent):
        with pytest.raises(ScalesError, match="exists and is no file of scales"):
            scales().write(other)
    assert text.read_text() == "[1, 2]\n"
    assert pipe.is_fifo()


def test_a_failed_write_keeps_the_old_file(file: Path) -> None:
    before = file.read_bytes()
    broken = scales(scales={"embedding": (float("nan"),)})
    with pytest.raises(ValueError, match="JSON"):
        broken.write(file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@given(place=st.integers(0, 1500), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damage_is_refused_in_a_sentence_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: bool
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.unlink(missing_ok=True)
    scales().write(file)
    content = bytearray(file.read_bytes())
    content[place] = byte
    file.write_bytes(content[: place + 1] if cut else content)
    message = ""
    try:
        read_scales(file, CONFIG, IDENTITY).check(CONFIG, IDENTITY)
    except ScalesError as refused:
        message = str(refused)
    assert message.isprintable()
