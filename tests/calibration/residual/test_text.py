"""Calibration text: what is read, what is chosen, and a sentence for each thing that can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flashnext.calibration.residual import text as texts
from flashnext.calibration.residual.text import TextReader, Windows, choose, repeated_share
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CalibrationError


@pytest.fixture(scope="module")
def reader(watched_checkpoint: Checkpoint) -> TextReader:
    return TextReader(watched_checkpoint)


def test_documents_of_all_forms(reader: TextReader, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hi", encoding="utf-8")
    lines = [[1, 2], "Hi", {"token_ids": [3]}, {"text": "Hi", "title": "no"}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    word, end = reader._encode("Hi", ""), reader.separator[0]
    expected = [*word, end, 1, 2, end, *word, end, 3, end, *word, end]
    assert reader.stream([tmp_path]).tolist() == expected
    assert reader.stream([tmp_path / "b.jsonl", tmp_path / "a.txt"]).tolist() == [
        *expected[len(word) + 1 :],
        *word,
        end,
    ]


def test_endings_in_capitals_mean_the_same(reader: TextReader, tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text("[7, 8]", encoding="utf-8")
    assert reader.stream([tmp_path]).tolist() == [7, 8, reader.separator[0]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "gives no tokens at all"),
        ("a.jsonl", b'\n""\n[]\n', "gives no tokens at all"),
        ("a.txt", b"ab\xff", "not UTF-8 at byte 2"),
        ("a.jsonl", b"[1, 512]", "line 1 has the token id 512, outside of the vocabulary of 512 (0 … 511)"),
        ("a.jsonl", b"[1]\n[-1]", "line 2 has the token id -1,"),
        ("a.jsonl", b"[1" + b"0" * 400 + b"]", "outside of the vocabulary"),
        ("a.jsonl", b"[1]\n[1, ", "line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b"[true]", "neither text nor token ids"),
        ("a.jsonl", b'{"ids": [1]}', "neither text nor token ids"),
        ("a.jsonl", b"[1.5]", "neither text nor token ids"),
        ("a.jsonl", b'"\\ud800"', "half a surrogate pair"),
    ],
)
def test_bad_text_is_one_sentence(reader: TextReader, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=re.escape(message)) as caught:
        reader.stream([tmp_path / name])
    assert str(tmp_path / name) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_bad_paths(reader: TextReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CalibrationError, match="does not exist"):
        reader.stream([tmp_path / "none.txt"])
    with pytest.raises(CalibrationError, match="holds no file that ends in"):
        reader.stream([tmp_path])
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text("x")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CalibrationError, match="leads out of the folder"):
        reader.stream([inside])
    monkeypatch.setattr(texts, "MAX_FILE_BYTES", 3)
    (tmp_path / "large.txt").write_text("four")
    with pytest.raises(CalibrationError, match="4 bytes, more than the 3"):
        reader.stream([tmp_path / "large.txt"])


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path / "checkpoint", tokenizer=False, mtp=False)
    reader = TextReader(Checkpoint.open(folder))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CalibrationError, match=r"has no tokenizer\.json. Give JSONL"):
        reader.stream([tmp_path / "a.txt"])
    (tmp_path / "a.jsonl").write_text("[1, 2]")
    assert len(reader.stream([tmp_path / "a.jsonl"])) == 3


def test_windows_tile_the_stream_and_parts_are_disjoint() -> None:
    stream = np.arange(1001, dtype=np.int32)
    first, second = choose(stream, 100, 250, 4, ("a", "b"))
    assert first.tokens.shape == second.tokens.shape == (3, 101)
    starts = [int(row[0]) for part in (first, second) for row in part.tokens]
    assert len(set(starts)) == 6
    assert all(s % 100 == 0 for s in starts)
    assert all(np.array_equal(row, np.arange(row[0], row[0] + 101)) for row in first.tokens)
    assert np.array_equal(choose(stream, 100, 250, 4, ("a", "b"))[1].tokens, second.tokens)
    assert first.record() != choose(stream, 100, 250, 5)[0].record()
    assert first.record().sequences == 3
    assert first.count == 300


def test_short_streams() -> None:
    (only,) = choose(np.arange(5, dtype=np.int32), 100, 250, 0)
    assert only.tokens.tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(CalibrationError, match="two are the least"):
        choose(np.arange(1, dtype=np.int32), 100, 250, 0)
    with pytest.raises(CalibrationError, match="1 window of 100, but text and held-out text each need one"):
        choose(np.arange(150, dtype=np.int32), 100, 250, 0, ("text", "held-out text"))


def test_repeated_text_is_noticed() -> None:
    stream = np.random.default_rng(0).integers(0, 500, 2000).astype(np.int32)
    text = Windows(stream[:1000].reshape(10, 100), 0)
    assert repeated_share(text, Windows(stream[1000:].reshape(10, 100), 0)) == 0
    assert repeated_share(text, text) == 1
    shifted = Windows(stream[37:937].reshape(9, 100), 0)
    assert 0.5 < repeated_share(text, shifted) < 1
    assert repeated_share(Windows(stream[None, :5], 0), text) == 0
