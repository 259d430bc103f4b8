"""`flashnext calibrate` from text to scales and report: what it writes, that it repeats, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from flashnext.calibration.residual import page
from flashnext.calibration.residual.calibrate import Job
from flashnext.calibration.residual.search import METHODS
from flashnext.export.checkpoint.identity import identity
from flashnext.export.config import ModelConfig
from flashnext.export.errors import ScalesError
from flashnext.export.residual_scales import read_scales, store_names
from flashnext.runtime.cli import calibrate as command
from flashnext.runtime.cli.main import main

AMOUNT = ["--tokens", "200", "--held-out-tokens", "96", "--length", "32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    ids = np.random.default_rng(0).integers(0, 512, (20, 40)).tolist()
    path.write_text("\n".join(map(json.dumps, ids)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reported(random_checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scales.json and report/ of the random checkpoint."""
    folder = tmp_path_factory.mktemp("reported")
    assert run(random_checkpoint, text, folder, "--report", str(folder / "report")) == 0
    return folder


def run(checkpoint: Path, text: Path, folder: Path, *more: str) -> int:
    return main(
        ["calibrate", str(checkpoint), "--text", str(text), "--out", str(folder / "scales.json"), *AMOUNT, *more]
    )


def test_scales_are_accepted_for_this_checkpoint(random_checkpoint: Path, reported: Path) -> None:
    config = ModelConfig.from_folder(random_checkpoint)
    scales = read_scales(reported / "scales.json", config, identity(random_checkpoint))
    assert (scales.method, scales.mode, scales.format) == ("input", "static", "e4m3")
    assert tuple(scales.scales) == store_names(config)
    assert (scales.text.sequences, scales.text.length, scales.text.seed) == (7, 32, 0)
    with pytest.raises(ScalesError, match="has 4 scales, the model 2 branches"):
        scales.check(config.with_overrides(hc_count=2), identity(random_checkpoint))


def test_truncated_scales_are_refused(random_checkpoint: Path, reported: Path, tmp_path: Path) -> None:
    cut = tmp_path / "scales.json"
    cut.write_bytes((reported / "scales.json").read_bytes()[:-200])
    with pytest.raises(ScalesError, match="cannot be read as JSON"):
        read_scales(cut, ModelConfig.from_folder(random_checkpoint), identity(random_checkpoint))


def test_report_has_every_way_and_repeats_to_the_digit(
    random_checkpoint: Path, text: Path, reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(random_checkpoint, text, tmp_path, "--report", str(tmp_path / "report"), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    for name in ("scales.json", "report/report.json", "report/report.html"):
        assert (tmp_path / name).read_bytes() == (reported / name).read_bytes()
    report = json.loads((tmp_path / "report/report.json").read_text(encoding="utf-8"))
    assert printed["recommendation"] == report["recommendation"]
    names = [q["name"] for q in report["quality"]]
    assert names[:2] == ["float32 (unquantized)", "bf16"]
    assert set(names[2:]) == {
        *(f"e4m3 static {m}" for m in METHODS),
        "e5m2 static max",
        "e5m2 static input",
        "e4m3 static input, stochastic",
        "e4m3 dynamic",
        "e4m3 dynamic, stochastic",
        "e5m2 dynamic",
    }
    assert all(0 < q["divergence"] < 1 for q in report["quality"][1:])
    assert report["held_out"]["sha256"] != report["text"]["sha256"]
    assert set(report["stores"]) == set(report["scales"]["mse"]) == set(report["input_errors"]["dynamic"])


def test_another_seed_chooses_other_text(random_checkpoint: Path, text: Path, reported: Path, tmp_path: Path) -> None:
    assert run(random_checkpoint, text, tmp_path, "--seed", "1", "--method", "max", "--format", "e5m2") == 0
    first, second = (json.loads((f / "scales.json").read_text(encoding="utf-8")) for f in (reported, tmp_path))
    assert first["text"]["sha256"] != second["text"]["sha256"]
    assert (second["method"], second["format"], second["text"]["seed"]) == ("max", "e5m2", 1)


def test_dynamic_scales_store_none(random_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    assert run(random_checkpoint, text, tmp_path, "--mode", "dynamic") == 0
    scales = read_scales(
        tmp_path / "scales.json", ModelConfig.from_folder(random_checkpoint), identity(random_checkpoint)
    )
    assert (scales.mode, scales.method, scales.scales) == ("dynamic", "dynamic", {})


class _Tags(HTMLParser):
    """Every start and end in order, to see that they match."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_needs_nothing_else(reported: Path) -> None:
    html = (reported / "report/report.html").read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(html)
    assert tags.open == []
    assert not {"src", "href", "onload"} & tags.attributes
    assert not {"script", "link", "img", "iframe"} & tags.tags
    assert not re.search(r"url\(|@import|https?://", html)
    plots = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(plots) == 1 + 4 + 2
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "nan" not in plot.lower()


def test_page_escapes_what_comes_from_files(reported: Path) -> None:
    report: dict[str, Any] = json.loads((reported / "report/report.json").read_text(encoding="utf-8"))
    report["checkpoint"]["folder"] = "<script>alert(1)</script>"
    assert "<script" not in page.render(report)


def test_options_name_what_the_library_has() -> None:
    assert command.METHODS == METHODS
    assert Job("", []).method in METHODS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--held-out", "x"], "add --report FOLDER"),
        (["--length", "5000"], "Windows of 5,000 tokens are longer than the model's context of 4,096"),
        (["--method", "best"], "invalid choice: 'best'"),
        (["--tokens", "0"], "from 1 to"),
        (["--report", "{text}"], "is a file; name a folder"),
        (["--report", "{text}/deep"], "is no folder; make it first"),
        (["--out", "{folder}"], "is a folder; name a file in it"),
        (["--out", "{folder}/none/scales.json"], "is no folder; make it first"),
        (["--report", "{folder}/report", "--held-out", "{text}"], "of the held-out text is in the calibration text"),
        (["--report", "{folder}/report", "--length", "3000"], "Give more text"),
    ],
)
def test_what_cannot_work_is_one_message(
    random_checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    words = [word.format(text=text, folder=tmp_path) for word in options]
    assert run(random_checkpoint, text, tmp_path, *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["[1, 2, 3, 4]\n", '{"model_type": "qwen4_exp"}', ""])
def test_only_scales_are_replaced(
    random_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "scales.json").write_text(content, encoding="utf-8")
    assert run(random_checkpoint, text, tmp_path) == 2
    assert "exists and is no file of scales" in capsys.readouterr().err
    assert (tmp_path / "scales.json").read_text(encoding="utf-8") == content


def test_empty_text_writes_nothing(random_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert run(random_checkpoint, empty, tmp_path) == 2
    assert "gives no tokens at all" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


def test_help_needs_no_torch() -> None:
    code = "import sys; from flashnext.runtime.cli.main import parsers; parsers(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
