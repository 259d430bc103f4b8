"""The benchmark's arithmetic by hand, and one small load on a real bundle."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashnext.export.errors import RequestError
from flashnext.runtime.bench import Load, Result, _gaps, measure, prompts
from flashnext.runtime.cli.main import main
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.row_metrics import RowCounts, RowMetrics
from flashnext.runtime.wait_histogram import WaitHistogram


def test_tokens_of_one_step_share_its_time() -> None:
    assert _gaps([1.0, 1.5, 2.5, 2.5, 4.5, 4.5, 4.5, 4.5]) == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert _gaps([1.0, 1.25, 3.25, 3.25]) == [0.25, 1.0, 1.0]
    assert _gaps([2.0]) == []


def test_facts_by_hand() -> None:
    result = Result(Load(8, 2, 4), first_token=[0.1, 0.3], per_token=[0.01] * 99 + [0.11], tokens_per_second=[5, 9, 7])
    result.kept_drafts, result.verifications = 6, 4
    facts = result.facts()
    assert facts["first_token_ms"]["p50"] == pytest.approx(200)
    assert facts["per_token_ms"]["p50"] == pytest.approx(10)
    assert facts["tokens_per_second"] == 7
    assert facts["acceptance_length"] == 2.5
    assert "ngram_rows" not in facts


def test_row_facts_by_hand() -> None:
    metrics, other = (
        RowMetrics(counts=RowCounts(80, 8000, 20, 30)),
        RowMetrics(counts=RowCounts(20, 2000), fetched_ahead=3),
    )
    metrics.decode.add(3e-6)
    other.prefill.add(0.5e-6)
    metrics.add(other)
    facts = metrics.facts()
    assert (facts["rows"], facts["bytes"], facts["chunks_fetched_ahead"]) == (100, 10_000, 3)
    assert (facts["hot"], facts["in_memory"]) == (0.3, 0.8)
    assert (facts["decode_wait_ms"]["p50"], facts["prefill_wait_ms"]["p99"]) == (0.004, 0.001)
    assert RowCounts(5, 6, 7, 8) - RowCounts(1, 2, 3, 4) == RowCounts(4, 4, 4, 4)


def test_prompts_are_taken_from_the_text() -> None:
    assert prompts(100, Load(3, 2, 1), list(range(10))) == [[0, 1, 2], [7, 8, 9]]
    assert prompts(100, Load(3, 2, 1)) == prompts(100, Load(3, 2, 1))
    with pytest.raises(RequestError, match="The text has 2 tokens and a prompt takes 3"):
        prompts(100, Load(3, 2, 1), [1, 2])


def test_wait_histogram_by_hand() -> None:
    waits = WaitHistogram()
    assert waits.quantile(0.5) == 0
    for microseconds in (0.5, 3, 3, 100):
        waits.add(microseconds / 1e6)
    assert waits.count == 4
    assert waits.quantile(0.25) == 1e-6
    assert waits.quantile(0.5) == 4e-6
    assert waits.quantile(1) == 128e-6
    waits.add(1e9)  # beyond the last bucket's edge
    assert waits.counts[-1] == 1


def test_the_command_measures_what_was_asked(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(random_bundle), "--prompt-length", "5", "9", "--batch", "1", "2", "--output-tokens", "4"]
    assert main([*words, "--repeats", "2", "--draft-tokens", "2", "--threads", "1", "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)["loads"]
    assert [(row["prompt_length"], row["batch"]) for row in loads] == [(5, 1), (5, 2), (9, 1), (9, 2)]
    for row in loads:
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"]
        assert 0 < row["per_token_ms"]["p50"] <= row["per_token_ms"]["p99"]
        assert row["tokens_per_second"] > 0
        assert 1 <= row["acceptance_length"] <= 3
        assert row["ngram_rows"]["decode_wait_ms"]["p99"] > 0
        steps = row["ngram_rows"]["rows"] // 8  # rows of a token
        assert steps >= 2 * row["batch"] * (row["prompt_length"] + 3)  # prompts and tokens of both runs


def test_rows_of_chunks_are_asked_for_before_their_step(
    random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(random_bundle), "--prompt-length", "90", "--output-tokens", "2", "--repeats", "1"]
    runner = ModelRunner.open(random_bundle, threads=1)
    load = Load(90, 1, 2, repeats=1)
    facts = measure(runner, load, chunk=20).facts()["ngram_rows"]
    runner.close()
    assert facts["chunks_fetched_ahead"] == 4
    assert main([*words, "--plot", str(tmp_path / "bench.svg"), "--threads", "1"]) == 0
    assert "n-gram rows of" in capsys.readouterr().out
    picture = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert picture.tag.endswith("svg")
    assert sum(1 for e in picture.iter() if e.tag.endswith("circle")) == 4  # a point in each chart
    assert [f.name for f in tmp_path.iterdir()] == ["bench.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "9"], "max_batch = 9 is not from 1 to the bundle's 3 slots"),
        (["--prompt-length", "999"], "999 tokens and a slot of this bundle holds 256"),
        (["--draft-tokens", "8"], "draft_tokens = 8, and this bundle verifies at most 7"),
        (["--text", "/no/such/file"], "/no/such/file"),
        (["--plot", "bench.png"], "plots are SVG; name a file such as bench.svg, not 'bench.png'"),
        (["--plot", "/no/such/folder/bench.svg"], "/no/such/folder is no folder; make it first"),
        (["--ngram-cache", "lots"], "expected an amount of memory such as 141G or 131GiB, found 'lots'"),
    ],
)
def test_loads_that_do_not_fit(
    random_bundle: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(random_bundle), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_text_without_tokens_is_not_taken_for_no_text(
    random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    assert main(["bench", str(random_bundle), "--text", str(tmp_path / "empty.txt")]) == 2
    assert "empty.txt holds no text" in capsys.readouterr().err


def test_a_text_that_is_not_utf8(random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 200)
    assert main(["bench", str(random_bundle), "--text", str(tmp_path / "latin.txt")]) == 2
    assert "latin.txt is not UTF-8 at byte 3. Convert it (iconv)" in capsys.readouterr().err
