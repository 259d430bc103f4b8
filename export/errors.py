"""Errors that a user can act on.

Anything a user can cause (a bad file, a wrong option, too long a prompt) is raised as a `FlashNextError` whose
message says what was wrong, the value, and the remedy. The command line prints that one message and exits with 2;
every other exception is a fault of this project and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class FlashNextError(Exception):
    """Base of all errors that the caller can mend; `str(error)` is one or more plain sentences."""


class ConfigError(FlashNextError):
    """A model configuration that is malformed, absurd or of another model."""


class CheckpointError(FlashNextError):
    """A checkpoint folder whose files or tensors do not form the model that its configuration describes."""


class BundleError(FlashNextError):
    """A bundle that is incomplete, of another version, or whose checkpoint has moved or changed."""


class ScalesError(FlashNextError):
    """Scales of an FP8 residual that are malformed, or of another checkpoint."""


class CalibrationError(FlashNextError):
    """Calibration text that cannot be used, or a model that is not finite on it."""


class RequestError(FlashNextError):
    """A prompt or sampling parameter that cannot be served."""


class EngineError(FlashNextError):
    """An engine that is not installed, not available here, or does not fit the bundle."""


class BuildError(FlashNextError):
    """An engine that cannot be built as it was asked for, or here."""


class PluginError(FlashNextError):
    """Kernels that cannot be built or launched here, or arguments that do not fit them."""


class GoldenError(FlashNextError):
    """Saved inputs and outputs that are damaged, of another bundle, or that there is no room for."""


class ReportError(FlashNextError):
    """A report that cannot be written where it should go."""


NO_THREADS = (
    "The system gives this process no more threads or processes. Ask for fewer with --threads, end other programs, "
    "or raise the limit: ulimit -u, or what a container or service sets (pids.max, TasksMax)."
)


@contextmanager
def message_at_exit() -> Iterator[None]:
    """For a script: what its user can mend ends it with the message alone and exit code 2."""
    try:
        yield
    except FlashNextError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
