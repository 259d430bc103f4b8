"""Builds one plan in a process of its own: `build_in_process`, and what runs there.

Why a process: TensorRT ends its process at some faults, which becomes an error here; a build can be ended at once, and
leaves no memory behind; its peak of memory can be measured; and TensorRT for RTX gives the same bytes for the same
graph. It orders some of what it writes by addresses, so the process has a fixed environment and layout of memory (no
randomized addresses where the system lets a process choose, no randomized hashes), one processor, and no callbacks
for progress, which threads call when they please. With TensorRT, kernels that are timed on a GPU differ anyway.

The job comes on standard input; progress and result go out as JSON lines; what libraries print goes to a log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flashnext.builder.job import PlanJob
from flashnext.export.errors import BuildError

Progress = Callable[[str, int, int], object]
"""Told of the phase under way, its steps done and in all."""

NO_RANDOMIZATION = 0x0040000
"""ADDR_NO_RANDOMIZE of Linux's personality(2)."""
UNKNOWN_PERSONALITY = 0xFFFFFFFF
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "TMPDIR")
KEPT_PREFIXES = ("CUDA_", "NVIDIA_", "TENSORRT_")
LOG = "build.log"
LOG_TAIL, LAST_LINES = 2000, 2


@dataclass(frozen=True)
class BuiltPlan:
    """What a build took and said: seconds, those of the processor, peak of host memory in bytes, version of TensorRT,
    warnings."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    version: str
    warnings: list[str]


def build_in_process(job: PlanJob, folder: Path, progress: Progress = lambda *_: None) -> BuiltPlan:
    """Build a plan; `job.graph` and `job.plan` are files of `folder`.

    Raises:
        BuildError: it cannot be built; or TensorRT ended its process.
    """
    start = time.perf_counter()
    with (folder / LOG).open("wb") as log, _child(folder, log) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(job.to_json())
        child.stdin.close()
        last = _follow(child.stdout, progress)
        child.wait()
    if "error" in last:
        raise BuildError(last["error"])
    if child.returncode or "version" not in last:
        raise BuildError(_ended(child.returncode, job, folder / LOG))
    (folder / LOG).unlink()
    return BuiltPlan(time.perf_counter() - start, *(last[k] for k in ("processor", "peak", "version", "warnings")))


@contextlib.contextmanager
def _child(folder: Path, log: Any) -> Iterator[subprocess.Popen[str]]:
    """The process; whatever happens, it has ended afterwards."""
    command = [sys.executable, "-P", "-m", "flashnext.builder.plan_process"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    child = subprocess.Popen(command, cwd=folder, env=_environment(), text=True, **pipes)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def _environment() -> dict[str, str]:
    """The child's. It never finds modules that were compiled before: that would show in its memory, and in the plan."""
    kept = {k: v for k, v in os.environ.items() if k in KEPT_VARIABLES or k.startswith(KEPT_PREFIXES)}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"{os.devnull}/none"}
    return {**kept, **fixed}


def _follow(lines: IO[str], progress: Progress) -> dict[str, Any]:
    """Pass on progress until the process closes its end; returns its last words."""
    last: dict[str, Any] = {}
    for line in lines:
        message = json.loads(line)
        if "phase" in message:
            progress(message["phase"], message["done"], message["steps"])
        else:
            last = message
    return last


def _ended(code: int, job: PlanJob, log: Path) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    tail = " ".join(log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip().splitlines()[-LAST_LINES:])
    killed = "It was killed, as the system does when memory runs out."
    reason = killed if code == -signal.SIGKILL else f"It said: {tail}"
    return f"The process that built {job.plan} ended with {how}. {reason}"


# --- in the process -----------------------------------------------------------------------------------------------


def main() -> int:
    """Read a job, build it, write the plan, tell the outcome."""
    _settle()
    parent = os.getppid()
    words = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the messages

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=words, flush=True)

    def report(phase: str, done: int, steps: int) -> bool:
        tell(phase=phase, done=done, steps=steps)
        return os.getppid() == parent

    from flashnext.builder.apis import open_api
    from flashnext.builder.build_plan import build_plan

    job = PlanJob.from_json(sys.stdin.read())
    if job.kind == "tensorrt-rtx":
        _one_processor()
    try:
        api = open_api(job.kind)
        plan, warnings = build_plan(api, job, report)
    except BuildError as error:
        tell(error=str(error))
        return 0
    Path(job.plan).write_bytes(plan)
    tell(version=api.version, warnings=warnings, peak=_peak(), processor=time.process_time())
    return 0


def _settle() -> None:
    """Fix the layout of memory (which takes a new start of the program), and end when the parent ends."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    current = libc.personality(UNKNOWN_PERSONALITY)
    if current & NO_RANDOMIZATION or current < 0:
        return
    if libc.personality(current | NO_RANDOMIZATION) >= 0 and libc.personality(UNKNOWN_PERSONALITY) & NO_RANDOMIZATION:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "flashnext.builder.plan_process"])


def _peak() -> int:
    """Peak of this process's resident memory in bytes. Not getrusage's: that counts the parent's, of before exec."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _one_processor() -> None:
    """Let threads take turns on one processor, and none interrupt another where it is woken.

    The builder's pools of threads do next to nothing, but their timing shows in the order of allocations.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's, who ends this process
    sys.exit(main())
