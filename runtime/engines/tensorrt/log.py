"""TensorRT's log lines, kept so that a failure can say why.

TensorRT's calls answer with False or None, and the reason goes to a logger. One logger serves a process (TensorRT
ignores another); it keeps the last lines, and what was logged since a mark is the reason of what failed after it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from flashnext.export.errors import EngineError
from flashnext.export.files import plain

KEPT_LINES = 200
SHOWN_LINES = 4
MAX_LINE = 500


class Log:
    """The last warnings and errors; `lines` are (severity, text), oldest first."""

    def __init__(self) -> None:
        self.lines: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES)
        self._count = 0

    def add(self, severity: str, text: str) -> None:
        """Keep a line; TensorRT may call this from any thread."""
        self._count += 1
        self.lines.append((severity, text))

    def mark(self) -> int:
        """A place in the log; see `since`."""
        return self._count

    def since(self, mark: int) -> list[str]:
        """What was logged since the mark: errors, or warnings where there are none; the last few."""
        new = list(self.lines)[max(0, len(self.lines) - (self._count - mark)) :]
        errors = [text for severity, text in new if "ERROR" in severity] or [text for _, text in new]
        return [plain(text.strip(), MAX_LINE) for text in errors[-SHOWN_LINES:]]

    def error(self, what: str, mark: int, remedy: str = "") -> EngineError:
        """The error of a call that failed, with TensorRT's reasons."""
        reasons = "; ".join(line.rstrip(".") for line in self.since(mark)) or "it gave no reason"
        return EngineError(f"{what}. TensorRT says: {reasons}.{remedy and ' ' + remedy}")


def logger_for(module: Any, log: Log) -> Any:
    """A logger of TensorRT's own class that writes to `log` what is at least a warning.

    Args:
        module: `tensorrt` or `tensorrt_rtx`, whose ILogger it derives from.
    """
    shown = (module.ILogger.Severity.INTERNAL_ERROR, module.ILogger.Severity.ERROR, module.ILogger.Severity.WARNING)

    class Logger(module.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in shown:
                log.add(severity.name, msg)

    return Logger()
