"""`flashnext residual`: a report on a real checkpoint, a comparison, and input that cannot be used."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.runtime.cli.main import main


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    rng = np.random.default_rng(0)
    path.write_text("\n".join(json.dumps(rng.integers(0, 500, 60).tolist()) for _ in range(3)))
    return path


class Outline(HTMLParser):
    """Headings, pictures, and whatever would need the network."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_report_and_comparison_with_itself(
    random_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["residual", str(random_checkpoint), "--text", str(text), "--tokens", "64", "--length", "32"]
    assert main([*words, "--against", str(random_checkpoint), "--report", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out/residual.json").read_text())
    assert printed["sum_error"] < 3e-8
    assert set(printed["difference"]["by_span"].values()) == {0.0}
    assert np.allclose(np.array(printed["shares"]).sum(1), 1, atol=3e-8)
    assert len(printed["mean_spans"]) == printed["checkpoint"]["branches"]
    outline = Outline()
    outline.feed((tmp_path / "out/residual.html").read_text())
    assert outline.tags.count("svg") == 5
    assert outline.links == []


def test_summary_names_what_matters(random_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["residual", str(random_checkpoint), "--text", str(text), "--tokens", "32", "--length", "16"]) == 0
    out = capsys.readouterr().out
    assert "layers.3.mlp" in out
    assert "Mean span by branch" in out
    assert "Contributions sum to each input" in out


def test_other_architectures_are_not_compared(
    random_checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_checkpoint(tmp_path / "other", {"num_hidden_layers": 4})
    words = ["residual", str(random_checkpoint), "--text", str(text), "--tokens", "16", "--length", "16"]
    assert main([*words, "--against", str(tmp_path / "other")]) == 2
    assert "has other layers or branches than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "gives no tokens at all"), ("[1, 2, 99999]", "99999, outside of the vocabulary"), ("{", "is not JSON")],
)
def test_bad_text_is_one_sentence(
    random_checkpoint: Path, tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content)
    assert main(["residual", str(random_checkpoint), "--text", str(bad), "--report", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_windows_beyond_the_context(
    random_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps([7] * 6000))
    assert main(["residual", str(random_checkpoint), "--text", str(ids), "--length", "5000"]) == 2
    assert "5000" in capsys.readouterr().err


def test_a_report_that_is_a_file(random_checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["residual", str(random_checkpoint), "--text", str(text), "--report", str(text)]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
