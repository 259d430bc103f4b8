"""Corrupt checkpoints and bundles, and hold the readers to one-sentence errors.

    python tests/export/checkpoint/fuzzing --checkpoint CKPT --bundle BUNDLE [--cases 2000] [--first 0]

Case n is the same on every run: its number seeds its generator. A case fails by any exception but FlashNextError, by
a message that is not plain text, by taking longer than 10 s or memory beyond 500 MB (the process's limit, so that a
larger request fails at once), and by writing anything. The first failures are printed, with the case's number to
repeat it by (--first N --cases 1).
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mutations
import targets

from flashnext.export.errors import FlashNextError

MEMORY_BYTES = 500 << 20
SECONDS = 10
MAX_MESSAGE = 12_000

Corrupt = Callable[[Random, bytes], bytes]
CHECKPOINT_FILES: dict[str, Corrupt] = {
    "config.json": mutations.corrupt_json,
    "generation_config.json": mutations.corrupt_json,
    "model.safetensors.index.json": mutations.corrupt_json,
    "model-00001-of-00002.safetensors": mutations.corrupt_safetensors,
    "model-00002-of-00002.safetensors": mutations.corrupt_safetensors,
    "tokenizer_config.json": mutations.corrupt_json,
    "tokenizer.json": mutations.corrupt_json,
    "chat_template.jinja": mutations.corrupt_template,
}
BUNDLE_FILES: dict[str, Corrupt] = {
    "manifest.json": mutations.corrupt_json,
    "tokenizer_config.json": mutations.corrupt_json,
    "chat_template.jinja": mutations.corrupt_template,
}
WEIGHTS = (4, 3, 4, 4, 4, 2, 1, 3), (10, 1, 2)
NEW_TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a sound random checkpoint of two shards")
    parser.add_argument("--bundle", type=Path, required=True, help="a bundle of it")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    limit_memory()
    signal.signal(signal.SIGALRM, too_long)
    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for number in range(options.first, options.first + options.cases):
        outcome, trace = run_case(number, options.checkpoint.resolve(), options.bundle.resolve())
        counts[outcome] += 1
        if trace:
            failures.append(f"case {number}: {trace}")
    print(*failures[:20], sep="\n")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{options.cases} cases: {dict(counts)}, {len(failures)} failures, peak memory {peak} MiB")
    return 1 if failures else 0


def limit_memory() -> None:
    """Allow this process 500 MB of address space more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class TooLongError(BaseException):
    """Nothing but this program may catch it."""


def too_long(*_: Any) -> None:
    raise TooLongError(f"longer than {SECONDS} s")


def run_case(number: int, checkpoint: Path, bundle: Path) -> tuple[str, str]:
    """How a case ended ("refused", "accepted", "failed"), and what was wrong with it."""
    rng = Random(number)
    of_bundle = rng.random() < 0.35
    files, weights = (BUNDLE_FILES, WEIGHTS[1]) if of_bundle else (CHECKPOINT_FILES, WEIGHTS[0])
    name = rng.choices(list(files), weights)[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "folder"
        shutil.copytree(bundle if of_bundle else checkpoint, folder, copy_function=os.link)
        old = (folder / name).read_bytes() if (folder / name).exists() else NEW_TEMPLATE
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(files[name](rng, old))
        before = listing(Path(scratch))
        outcome, trace = attempt(targets.use_bundle if of_bundle else targets.use_checkpoint, folder, checkpoint)
        if not trace and listing(Path(scratch)) != before:
            outcome, trace = "failed", "it wrote something"
    return outcome, trace and f"{name} of a {'bundle' if of_bundle else 'checkpoint'}: {trace}"


def attempt(use: Callable[[Path, Path], None], folder: Path, sound: Path) -> tuple[str, str]:
    signal.alarm(SECONDS)
    try:
        use(folder, sound)
    except FlashNextError as error:
        message = str(error)
        if isinstance(error.__context__, MemoryError):
            return "failed", f"it asked for more memory than it may have: {message!r:.500}"
        plain = all(line.isprintable() for line in message.splitlines()) and 0 < len(message) < MAX_MESSAGE
        return ("refused", "") if plain else ("failed", f"its message is not plain: {message!r:.500}")
    except BaseException:
        return "failed", traceback.format_exc(limit=-8)
    finally:
        signal.alarm(0)
    return "accepted", ""


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*"))


if __name__ == "__main__":
    sys.exit(main())
