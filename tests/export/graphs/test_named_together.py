"""Graphs beside the checkpoint: two folders of one name, a folder written again, and what a failed run leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashnext.export.graphs.beside import named_together, prefix, remove_others


def test_folders_of_one_name_have_prefixes_of_their_own(tmp_path: Path) -> None:
    a, b = tmp_path / "a/golden", tmp_path / "b/golden"
    assert prefix(a) != prefix(b)
    assert prefix(a).startswith("golden-")
    b.parent.mkdir()
    a.parent.symlink_to(b.parent, target_is_directory=True)
    assert prefix(a) == prefix(b)  # the same folder by two paths
    before = prefix(b)
    b.symlink_to(tmp_path)  # the folder is what takes the link's place
    assert prefix(b) == before


def test_a_prefix_is_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prefix(Path("golden")) == prefix(tmp_path / "golden") == prefix(Path(f"../{tmp_path.name}/golden"))


def test_files_appear_together(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old")
    with named_together(tmp_path) as path_of:
        path_of("one").write_text("new")
        path_of("two").write_text("new")
        path_of("never written")
        assert (tmp_path / "one").read_text() == "old"
        assert not (tmp_path / "two").exists()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "new", "two": "new"}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old")

    def fail() -> None:
        with named_together(tmp_path) as path_of:
            path_of("one").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "old"}


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "body.onnx").symlink_to(victim)
    with named_together(folder) as path_of:
        path_of("body.onnx").write_text("new")
    assert victim.read_text() == "mine"
    assert not (folder / "body.onnx").is_symlink()


def test_only_files_of_the_prefix_are_removed(tmp_path: Path) -> None:
    names = (
        "golden-1.body.onnx",
        "golden-1.mtp.onnx",
        ".golden-1.body.onnx.9f.part",
        "golden-2.body.onnx",
        "x.safetensors",
    )
    for name in names:
        (tmp_path / name).touch()
    remove_others(tmp_path, "golden-1.", ["golden-1.mtp.onnx"])
    assert sorted(os.listdir(tmp_path)) == ["golden-1.mtp.onnx", "golden-2.body.onnx", "x.safetensors"]
