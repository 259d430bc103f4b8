"""What holds for every file of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINE_PATH = re.compile(r"(?<![\w.$}*])/(?:home|root|work|opt|tmp|Users)/\w")


def tracked_text_files() -> list[Path]:
    """Files that git knows (or would add); those that are not text are left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout.decode().split("\0")
    files = [ROOT / name for name in listed if name]
    return [f for f in files if f.is_file() and f.stat().st_size < 1 << 20 and b"\0" not in f.read_bytes()]


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in tracked_text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []
