"""Parts, split and tidying of texts; the list of licences names every source."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest

from flashnext.calibration.corpus import r_data, tidy
from flashnext.calibration.corpus.build import HELD_OUT_EVERY, HELD_OUT_FIRST, Document, parts, read_documents, split
from flashnext.calibration.corpus.sources import SOURCES, CorpusError

ROOT = Path(__file__).parents[3]
PARAGRAPHS = [f"paragraph {i} " + "word " * 20 for i in range(200)]


def test_parts_lose_nothing() -> None:
    text = "\n\n".join(PARAGRAPHS)
    cut = parts(text, 500)
    assert "".join(cut) == text
    assert all(500 <= len(p) < 700 for p in cut[:-1])
    assert parts("", 500) == []


def test_split_holds_out_every_twentieth_part() -> None:
    words = " ".join(f"w{i}" for i in range(400_000)).split(" ")
    text = "\n\n".join(" ".join(words[i : i + 200]) for i in range(0, len(words), 200))
    train, held_out = split(iter([Document("a", "one", text)]))
    count = len(parts(text))
    assert len(held_out) == len(range(HELD_OUT_FIRST, count, HELD_OUT_EVERY))
    trained = {w for d in train for w in d.text.split()}
    assert not trained & {w for d in held_out for w in d.text.split()}
    assert sum(len(d.text) for d in train + held_out) == len(text)


def test_documents_come_back_whatever_their_texts_hold(tmp_path: Path) -> None:
    documents = [Document("a", "one", "cut\u2028here\x85or\x0chere"), Document("a", "two", "b")]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in documents), encoding="utf-8")
    assert read_documents(path) == documents


@pytest.mark.parametrize("line", ["{", "[1]", '{"source": "a"}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(CorpusError, match="is not a corpus file"):
        read_documents(tmp_path / "train.jsonl")


def test_tidying() -> None:
    assert tidy.unwrap("One line\r\nand its\r\nend.\r\n\r\n\r\nNext  \n") == "One line and its end.\n\nNext\n"
    assert tidy.plain("a\t\x00b  \n\n\n\n\n\nc") == "a    b\n\n\nc\n"
    notes = "A play\n\nThis Project Gutenberg file may be copied.\n\nAct one"
    assert tidy.without_licence_notes(notes) == "A play\n\nAct one\n"


def test_strings_of_an_r_database(tmp_path: Path) -> None:
    lines = ["", "EMMA", *(f"line {i}, naïve" for i in range(r_data.MIN_LINES))]
    strings = b"".join(struct.pack(">Ii", 0x40009, len(s.encode())) + s.encode() for s in lines)
    record = b"X\n" + struct.pack(">III", 3, 262657, 197888) + struct.pack(">II", 16, len(lines)) + strings
    short = b"X\n" + struct.pack(">II", 16, 1) + struct.pack(">Ii", 0x40009, 1) + b"a"
    database = b"".join(struct.pack(">I", len(r)) + zlib.compress(r) for r in (short, record))
    (tmp_path / "Rdata.rdb").write_bytes(database)
    assert list(r_data.strings_of_database(tmp_path / "Rdata.rdb")) == [("Emma", lines)]


def test_licences_of_all_sources_are_listed() -> None:
    listed = (ROOT / "docs/corpus.md").read_text(encoding="utf-8")
    for source in SOURCES:
        assert f"`{source.package}`" in listed
