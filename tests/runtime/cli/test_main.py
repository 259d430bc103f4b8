"""The command's frame: help, exit codes, and errors in one message."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashnext.export.errors import FlashNextError
from flashnext.runtime.cli import info
from flashnext.runtime.cli.main import COMMANDS, main

FLASHNEXT = [sys.executable, "-m", "flashnext.runtime.cli.main"]


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line that the user has to mend; returns its one message."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flashnext: error: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_teaches_with_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert f"flashnext {' '.join(command)}".strip() in capsys.readouterr().out.split("\n\n", 1)[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("flashnext-trt 0.")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flashnext.runtime.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "finally: assert not {'torch', 'onnx', 'onnxruntime', 'polygraphy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "No command given"),
        (["rnu"], "Unknown command 'rnu'. Did you mean run?"),
        (["run", "b", "--max-token", "3"], "Unknown option --max-token. Did you mean --max-tokens?"),
        (["run", "b", "--frobnicate=1"], "Unknown option --frobnicate."),
        (["run", "b", "c"], "Unexpected argument 'c'"),
        (["run"], "required: BUNDLE"),
        (["run", "b", "--max-tokens", "none"], "expected a whole number, found 'none'"),
        (["run", "b", "--max-tokens", "0"], "at least 1, found 0"),
        (["run", "b", "--top-p", "most"], "expected a number, found 'most'"),
        (["run", "b", "--token-ids", "1,x"], "found '1,x'"),
        (["run", "b", "--prompt", "-x"], "--option=-value"),
        (["export", "c", "b", "--window", "65"], "from 1 to 64, found 65"),
        (["export", "c", "b", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["export", "c", "b", "--rope-scaling", "yarn:long"], "found 'yarn:long'"),
        (["info", "nowhere"], "nowhere is neither a bundle"),
    ],
)
def test_what_the_user_can_mend_is_one_message(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(argv, capsys)
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("argv", [["--verbose", "info", "nowhere"], ["info", "nowhere", "--verbose"]])
def test_verbose_shows_the_traceback(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "Traceback" in capsys.readouterr().err


def _failing(error: BaseException) -> object:
    def execute(_: object) -> int:
        raise error

    return execute


def test_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "execute", _failing(KeyError("fault")))
    with pytest.raises(KeyError):
        main(["info", "x"])


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(info, "execute", _failing(KeyboardInterrupt()))
    assert main(["info", "x"]) == 130
    assert capsys.readouterr().err == "\nflashnext: interrupted\n"


INTERRUPTED = """
import sys
from flashnext.runtime.cli import info, main
info.execute = lambda arguments: exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
sys.argv = ["flashnext", "info", "."]
sys.exit(main.main())
"""


def test_interruption_inside_code_of_a_string_ends_with_130(tmp_path: Path) -> None:
    """Python 3.11 ends the process by the signal there, though the exception is handled, when it runs a module."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    run = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path,
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (run.returncode, run.stderr) == (130, b"\nflashnext: interrupted\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "pip install 'flashnext-trt[export]'"),
        (ModuleNotFoundError("No module named 'onnx.helper'", name="onnx.helper"), "the package onnx. Install it"),
        (PermissionError(13, "Permission denied", "bundle"), "bundle: Permission denied"),
        (OSError(28, "No space left on device"), "cannot be written (No space left on device). Make room"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "no more threads or processes. Ask for fewer"),
        (FlashNextError("one\n  - two"), "one\n  - two"),
    ],
)
def test_error_becomes_a_message(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "execute", _failing(error))
    assert words in error_of(["info", "x"], capsys)


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stack that no address space holds makes the system refuse a thread, as a limit on their number does."""

    def execute(_: object) -> int:
        before = threading.stack_size(1 << 47)
        try:
            threading.Thread(target=print).start()
        finally:
            threading.stack_size(before)
        return 0

    monkeypatch.setattr(info, "execute", execute)
    assert "no more threads or processes. Ask for fewer with --threads" in error_of(["info", "x"], capsys)


def test_another_runtime_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "execute", _failing(RuntimeError("fault")))
    with pytest.raises(RuntimeError, match="fault"):
        main(["info", "x"])


def test_module_that_no_extra_brings_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "execute", _failing(ModuleNotFoundError("No module named 'x'", name="x")))
    with pytest.raises(ModuleNotFoundError):
        main(["info", "x"])


def test_closed_pipe_is_silent(random_checkpoint: Path) -> None:
    command = subprocess.Popen([*FLASHNEXT, "info", random_checkpoint], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == b""
    command.stderr.close()
    assert command.wait() == 141
