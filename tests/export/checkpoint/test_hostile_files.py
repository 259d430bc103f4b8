"""Files that are no files, too large, or elsewhere: refused by a sentence, without hanging and without the memory."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext.export.checkpoint import Checkpoint, identity
from flashnext.export.checkpoint.shards import INDEX_NAME
from flashnext.export.errors import BundleError, FlashNextError
from flashnext.export.files import MAX_JSON_VALUES
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.chat import ChatTemplate

CHECKPOINT_FILES = ("config.json", INDEX_NAME, "model-00001-of-00002.safetensors")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_no_regular_file_in_a_checkpoint(sharded_folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (sharded_folder / name).unlink()
    make(sharded_folder / name)
    for read in (Checkpoint.open, identity):
        with pytest.raises(FlashNextError, match=f"{name} .*it is not a regular file"):
            read(sharded_folder)


@pytest.fixture
def bundle(random_bundle: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(random_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("make", [pipe, device, folder])
@pytest.mark.parametrize("name", ["manifest.json", "body.onnx"])
def test_no_regular_file_in_a_bundle(bundle: Path, name: str, make: Callable[[Path], None]) -> None:
    (bundle / name).unlink()
    make(bundle / name)
    with pytest.raises(BundleError, match=name):
        Manifest.read(bundle)


def test_link_that_leaves_the_bundle(bundle: Path, tmp_path: Path) -> None:
    (bundle / "body.onnx").rename(tmp_path / "body.onnx")
    (bundle / "body.onnx").symlink_to("../body.onnx")
    with pytest.raises(BundleError, match=r"body\.onnx is a link that leaves the bundle's folder"):
        Manifest.read(bundle)


@pytest.mark.parametrize("name", ["../body.onnx", "/etc/passwd", "", "..", "a/b", "a\0", "x" * 5000, "\x1b[31m"])
def test_manifest_that_names_a_file_elsewhere(bundle: Path, name: str) -> None:
    raw = json.loads((bundle / "manifest.json").read_text())
    raw["graphs"]["body"]["file"] = name
    (bundle / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=r"its own folder|lacks") as refused:
        Manifest.read(bundle)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ngrams", [], "n-gram tables are not those of the layers"),
        ("ops", {"SparseMoE": 7}, "custom ops .* are not those of this release"),
        ("sampling_defaults", {"temperature": 10**400}, "expected a number"),
    ],
)
def test_manifest_that_does_not_fit(bundle: Path, key: str, value: object, words: str) -> None:
    raw = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(BundleError, match=words):
        Manifest.read(bundle)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"weight_map":' + b"[[]," * (MAX_JSON_VALUES // 2 + 1), b"{" + b" " * (33 << 20), b"9" * 5000],
)
def test_json_that_would_take_memory(sharded_folder: Path, content: bytes) -> None:
    (sharded_folder / INDEX_NAME).write_bytes(content)
    del content
    tracemalloc.start()
    with pytest.raises(FlashNextError, match=INDEX_NAME):
        Checkpoint.open(sharded_folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


def test_template_that_is_no_text_or_endless(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BundleError, match="is not UTF-8 text"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (5 << 20))
    with pytest.raises(BundleError, match="more than the"):
        ChatTemplate.open(tmp_path)
