"""Headers: what the reference package writes is read, what is unsound is refused, and nothing crashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES, map_file, read_header, tensor_view
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, write_safetensors
from flashnext.export.errors import CheckpointError

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw_file(path: Path, header: Any, data: bytes = bytes(24), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@SETTINGS
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5),
    dtypes=st.lists(st.sampled_from(sorted(NUMPY_DTYPES)), min_size=5, max_size=5),
)
def test_round_trip(tmp_path: Path, shapes: list[tuple[int, ...]], dtypes: list[str]) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
        arrays[f"t{i}"] = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(NUMPY_DTYPES[dtype])
    file = tmp_path / "x.safetensors"
    plan = [PlannedTensor(f"t{i}", d, s) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=False))]
    write_safetensors(file, plan, lambda name: arrays[name])
    infos = read_header(file)
    assert infos.keys() == arrays.keys()
    mapped = map_file(file)
    for name, array in arrays.items():
        view = tensor_view(mapped, infos[name])
        assert (view.dtype, view.shape) == (array.dtype, array.shape)
        assert view.tobytes() == array.tobytes()


def test_reference_package_agrees(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(3, dtype=np.int64)}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", {"key": "value"})
    infos = read_header(tmp_path / "theirs")
    plan = [PlannedTensor(n, i.dtype, i.shape) for n, i in infos.items()]
    write_safetensors(tmp_path / "ours", plan, lambda name: arrays[name])
    ours: Mapping[str, Any] = safetensors.numpy.load_file(tmp_path / "ours")
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensor_view(map_file(tmp_path / "theirs"), infos[name]), array)
        np.testing.assert_array_equal(ours[name], array)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "not an object"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "codec"),
        (b"[" * 100_000, "recursion"),
        (b'{"a": %s}' % (b"9" * 5000), "digits"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "duplicate key 'dtype'"),
        ({"a": 5}, "needs exactly dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "more": 1}}, "needs exactly"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "unknown dtype 'F33'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {**ENTRY, "shape": [2, -3]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [2, 3.0]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [1] * 9}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [1 << 63]}}, "impossible shape"),
        ({"a": {**ENTRY, "shape": [1 << 40, 1 << 40]}}, "takes 4,835,703,278,458,516,698,824,704 bytes"),
        ({"a": {**ENTRY, "data_offsets": [24, 0]}}, "takes 24 bytes, its offsets -24"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "impossible data_offsets"),
        ({"a": {**ENTRY, "data_offsets": [True, 24]}}, "impossible data_offsets"),
        ({"a": {**ENTRY, "data_offsets": [8, 32]}}, "leaves a gap"),
        ({"a": ENTRY, "b": ENTRY}, "overlaps"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [20, 44]}}, "overlaps"),
        ({"a": {**ENTRY, "shape": [8], "data_offsets": [0, 32]}}, "(truncated)"),
        ({"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}}, "20 bytes after the last tensor"),
        ({"a\nb\x1b[31m": 5}, r"'a\nb\x1b[31m'"),
    ],
)
def test_unsound_header(tmp_path: Path, header: Any, reason: str) -> None:
    text = refusal(raw_file(tmp_path / "x.safetensors", header))
    assert reason in text
    assert "x.safetensors" in text
    assert len(text) < 500


@pytest.mark.parametrize("length", [1000, 1 << 40, (1 << 64) - 1])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    assert f"claims {length:,} bytes" in refusal(raw_file(tmp_path / "x", {"a": ENTRY}, length=length))


def test_header_too_long(tmp_path: Path) -> None:
    file = raw_file(tmp_path / "x", {}, b"", length=1 << 30)
    with file.open("r+b") as stream:
        stream.truncate(1 << 31)  # a hole: takes no space
    assert "more than the 33,554,432 allowed" in refusal(file)


def test_not_a_file(tmp_path: Path) -> None:
    assert "has only 3 bytes" in refusal(_bytes(tmp_path / "short", b"abc"))
    assert "not a regular file" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refusal(tmp_path / "loop")


def _bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@SETTINGS
@given(data=st.data())
def test_flipped_bytes_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    file = raw_file(
        tmp_path / "x", {"a": ENTRY, "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}}, bytes(28)
    )
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(len(content) - 30, len(content)))])
    infos: dict[str, Any] = {}
    complaint = ""
    try:
        infos = read_header(file)
    except CheckpointError as error:
        complaint = str(error)
    assert len(complaint) < 1000
    assert complaint.isprintable()
    for info in infos.values():
        tensor_view(map_file(file), info)
