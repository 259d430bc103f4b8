"""A folder appears whole or not at all: errors, full disks, and processes that are killed at any moment."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.errors import BundleError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.graphs.whole_folder import whole_or_nothing

FILES = 40
WRITER = f"""
import sys
from pathlib import Path
from flashnext.export.graphs.whole_folder import whole_or_nothing

print("ready", flush=True)
while True:
    with whole_or_nothing(Path(sys.argv[1])) as folder:
        for number in range({FILES}):
            (folder / str(number)).write_bytes(b"x" * 10_000)
"""


def fill(target: Path, content: str) -> None:
    with whole_or_nothing(target) as folder:
        (folder / "file").write_text(content)


def test_links_in_what_is_replaced_are_not_followed(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    for folder in (target, elsewhere):
        folder.mkdir()
    (elsewhere / "file").write_text("mine")
    (target / "file").symlink_to(elsewhere / "file")
    (target / "folder").symlink_to(elsewhere)
    fill(target, "new")
    assert (elsewhere / "file").read_text() == "mine"
    assert [(f.name, f.is_symlink()) for f in target.iterdir()] == [("file", False)]


def test_new_and_replaced(tmp_path: Path) -> None:
    for content in ("first", "second"):
        fill(tmp_path / "target", content)
        assert (tmp_path / "target/file").read_text() == content
        assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_an_error_keeps_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "target", "first")
    with pytest.raises(BundleError, match="nothing was kept"), whole_or_nothing(tmp_path / "target") as folder:
        (folder / "no such folder/file").write_text("second")
    assert (tmp_path / "target/file").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_leftovers_go_but_not_those_of_others(tmp_path: Path) -> None:
    gone = [tmp_path / f".target.{kind}-abcdefg{n}" for n, kind in enumerate(("new", "old", "new"))]
    kept = [tmp_path / name for name in (".target.other-abcdefgh", ".target.x.new-abcdefgh", ".target.new-ab")]
    for folder in (*gone, *kept):
        folder.mkdir()
    with whole_or_nothing(tmp_path / "target"):
        working = [p for p in tmp_path.iterdir() if p not in kept]
        fill(tmp_path / "target", "meanwhile")
        assert all(p.exists() for p in (*kept, *working)), "the folder of a process at work is not a leftover"
    assert not any(p.exists() for p in gone)


def test_a_bundle_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    old = tmp_path / ".target.old-abcdefgh/target"
    old.mkdir(parents=True)
    (old / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_or_nothing(tmp_path / "target"):
        raise KeyboardInterrupt
    assert (tmp_path / "target/file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_writer_killed_at_random_moments(tmp_path: Path) -> None:
    rng = Random(0)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "target"], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        writer.kill()
        writer.communicate()
        assert not (tmp_path / "target").exists() or len(list((tmp_path / "target").iterdir())) == FILES
    fill(tmp_path / "target", "last")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


# --- exports ------------------------------


def export_command(checkpoint: Path, bundle: Path) -> list[str]:
    words = ("-m", "flashnext.runtime.cli.main", "export", checkpoint, bundle, "--overwrite")
    return [sys.executable, *map(str, words)]


def test_truncated_shard(random_checkpoint: Path, tmp_path: Path) -> None:
    for file in random_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Exception, match="truncated"):
        export_bundle(tmp_path, tmp_path / "bundle")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("limit", [60_000, pytest.param(100, marks=pytest.mark.slow)])
def test_full_disk(limit: int, random_checkpoint: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the same places."""

    def lower_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = export_command(random_checkpoint, tmp_path / "bundle")
    done = subprocess.run(command, preexec_fn=lower_limit, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_export_killed_at_random_moments(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    small = {"num_hidden_layers": 2}
    random_checkpoint = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), small, mtp=False)
    bundle, rng = tmp_path / "bundle", Random(1)
    start = time.monotonic()
    export_bundle(random_checkpoint, bundle)
    longest = 1.3 * (time.monotonic() - start) + 5
    for _ in range(20):
        process = subprocess.Popen(export_command(random_checkpoint, bundle), stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.0, longest))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if bundle.exists():
            Manifest.read(bundle)
    export_bundle(random_checkpoint, bundle, ExportOptions(overwrite=True))
    Manifest.read(bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]
