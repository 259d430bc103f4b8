"""The command `flashnext`: from a checkpoint to a bundle to text.

    flashnext --help
    flashnext export CHECKPOINT BUNDLE
    flashnext run BUNDLE --prompt "Once upon a time"

A subcommand is a module with `add_parser` and `execute`. What a user can mend ends with one message on standard error
and exit code 2; `--verbose` adds the traceback. A fault of this program keeps its traceback and ends with 1.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import cast

from flashnext.export.errors import NO_THREADS, FlashNextError
from flashnext.runtime.cli import bench, build, calibrate, export, golden, info, plugins, residual, run, validate
from flashnext.runtime.cli.parser import Parser, UsageError, check_command, check_leftovers

COMMANDS = {
    "export": export,
    "build": build,
    "run": run,
    "info": info,
    "bench": bench,
    "validate": validate,
    "golden": golden,
    "calibrate": calibrate,
    "residual": residual,
    "plugins": plugins,
}

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_TERMINATED = 143
"""128 + the signal's number (SIGINT, SIGPIPE, SIGTERM), as shells report them."""

DESCRIPTION = """\
Qwen3.8-Flash-Next ahead of time: export a checkpoint to a bundle of ONNX graphs, run the bundle, look into both."""

EXAMPLES = """\
a first run:
  flashnext info CHECKPOINT                      what the checkpoint holds, and the memory it takes
  flashnext export CHECKPOINT BUNDLE             write the ONNX graphs; the weights stay where they are
  flashnext run BUNDLE --prompt "Once upon a"    generate text
  flashnext build BUNDLE                         build an engine of TensorRT
  flashnext run BUNDLE --chat                    talk to it
  flashnext validate BUNDLE                      compare the graphs with the PyTorch model
  flashnext golden BUNDLE --out FOLDER           save inputs and outputs for other tools to compare with
  flashnext calibrate CHECKPOINT --text FILES …  scales for an FP8 residual, and what it costs
  flashnext plugins build                        compile the TensorRT plugin library

Each command explains itself: flashnext COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _set_up_process()
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a broken pipe shows here, not while the interpreter exits
        return code
    except (FlashNextError, OSError, ModuleNotFoundError, RuntimeError) as error:
        return _report(error, verbose="--verbose" in words)
    except KeyboardInterrupt:
        print("\nflashnext: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Where a KeyboardInterrupt itself meets code that `exec` runs from a string, Python 3.11 notes that nobody
    handles it, and ends the process by the signal even after somebody has."""


def _set_up_process() -> None:
    """As a program: a request to end cleans up like Ctrl-C does, closed streams are empty ones, and a terminal that
    cannot show a character shows a question mark."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored, and stays so
        signal.signal(signal.SIGINT, _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for the process's whole life)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _interrupt(*_: object) -> None:
    raise Interrupted


def _dispatch(words: list[str]) -> int:
    parser, subparsers = parsers()
    check_command(words, COMMANDS)
    arguments, leftovers = parser.parse_known_args(words)
    check_leftovers(leftovers, subparsers.get(arguments.command, parser))
    if arguments.command is None:
        raise UsageError(f"No command given. The commands are: {', '.join(COMMANDS)}. See: flashnext --help")
    execute = cast(Callable[[argparse.Namespace], int], COMMANDS[arguments.command].execute)
    return execute(arguments)


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser and those of its subcommands; each of them knows the global options."""
    common = Parser(add_help=False)
    common.add_argument(
        "--verbose", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error too"
    )
    version = importlib.metadata.version("flashnext-trt")
    parser = Parser(prog="flashnext", description=DESCRIPTION, epilog=EXAMPLES, parents=[common])
    parser.add_argument("--version", action="version", version=f"flashnext-trt {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    return parser, {name: module.add_parser(commands, [common]) for name, module in COMMANDS.items()}


def _report(error: Exception, verbose: bool) -> int:
    """Print what the user can mend as one message; other exceptions go on."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output has gone (`flashnext … | head`): nothing is left to say, also not while exiting.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    message = _message(error)
    if message is None:
        raise error
    if verbose:
        traceback.print_exception(error)
    print(f"flashnext: error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "polygraphy": "validate",
    "onnxruntime": "cpu",
}


def _message(error: Exception) -> str | None:
    """The error in one message with its remedy, or None if the user cannot mend it."""
    if isinstance(error, FlashNextError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        extra = EXTRAS.get(package)
        return extra and f"This needs the package {package}. Install it with: pip install 'flashnext-trt[{extra}]'"
    if _lacks_threads(error):
        return NO_THREADS
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check that the path exists and that you may use it."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"The output cannot be written ({error.strerror}). Make room, or send it elsewhere."
    return None


def _lacks_threads(error: Exception) -> bool:
    """Whether the system refused a thread, or a process (a fork's error names no file)."""
    if isinstance(error, OSError):
        return error.filename is None and error.strerror == os.strerror(errno.EAGAIN)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


if __name__ == "__main__":
    sys.exit(main())
