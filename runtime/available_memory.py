"""How much memory this process may still take: what the machine has left, within the limits of its control groups.

Page cache that can be dropped counts as left. Control groups of both versions are read, with all groups above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

LIMITS = {"memory.max": ("memory.current", ""), "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_")}
"""By the file of a group's limit (versions 2 and 1): the file of its use, and how `memory.stat` prefixes sums."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes; of what the system under `root` says."""
    machine = _table(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    return min([machine or 1 << 62, *(_left(group) for group in _groups(root))])


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the memory groups that the process is in, from its own to the root's."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mounts = [root / "sys/fs/cgroup" / controllers] + [root / "sys/fs/cgroup/unified"] * (not controllers)
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield from (f for f in (folder, *folder.parents) if f == mount or mount in f.parents)


def _left(group: Path) -> int:
    """Bytes until the group's limit; nearly endless without one."""
    for limit, (used, prefix) in LIMITS.items():
        try:
            most, now = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # not this version, or "max"
            continue
        stat = _table(group / "memory.stat")
        files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        return max(most - now + files, 0)
    return 1 << 62


def _table(file: Path) -> Mapping[str, int]:
    """Lines of a name and a number."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
