"""The script measures any checkpoint of the layout: here the random one, on a text of two pages."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flashnext.calibration.evaluation import evaluate
from flashnext.export.checkpoint.random_tokenizer import TEXT

ROOT = Path(__file__).parents[3]


def test_figures(
    random_checkpoint: Path,
    random_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("train", TEXT), ("held_out", TEXT[200:] + TEXT)):
        document = {"source": "a", "title": "b", "text": text}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(document) + "\n", encoding="utf-8")
    for name, value in (("PROMPTS", 1), ("PROMPT_TOKENS", 20), ("NEW_TOKENS", 6), ("INDEXER_WINDOWS", 2)):
        monkeypatch.setattr(evaluate, name, value)
    monkeypatch.setattr(evaluate, "export_bundle", lambda folder, bundle, options: bundle.symlink_to(random_bundle))
    evaluate.main([str(random_checkpoint), "--corpus", str(tmp_path), "--windows", "3", "--threads", "1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    loss = figures["held-out loss, nats per token"]
    assert loss > 6  # random weights know nothing
    assert figures["held-out perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert figures["Kneser-Ney 5-gram loss"] < 3  # the baseline has read the text
    assert figures["loss without n-gram rows"] != loss
    assert (
        figures["loss beyond the budget of 32 tokens, QSA"]
        != figures["loss beyond the budget of 32 tokens, dense attention"]
    )
    assert 0 < figures["indexer recall, final"] < 1
    assert 1 <= figures["tokens per round, 4 drafts"] <= 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["--corpus", "nowhere"], "Build the corpus first"),
        (["--windows", "0"], "--windows is 0; give 1 or more"),
        (["--threads", "-1"], "--threads is -1; give 1 or more"),
    ],
)
def test_wrong_input_ends_with_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        evaluate.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
