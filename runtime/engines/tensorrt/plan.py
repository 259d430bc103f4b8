"""Plans in memory: TensorRT and TensorRT for RTX, whose runtimes are called alike.

A plan holds one graph of a bundle. Each of its profiles gets an execution context of its own, so that no step waits for
a change of profile; all contexts of all plans share one block of scratch memory, since steps run one after another.

    library = Library.open("tensorrt")
    plan = library.load(content, "body.plan")
    context = plan.context(profile_index, stream)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.tensorrt.device import Memory
from flashnext.runtime.engines.tensorrt.log import Log, logger_for

MODULES = {
    "tensorrt": ("tensorrt", "tensorrt_bindings"),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
"""The names under which an installation may be found, first one first."""
TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
    "FP8": "float8_e4m3fn",
}
"""TensorRT's names of dtypes, and the manifest's."""


class Library:
    """An installed TensorRT.

    Args:
        kind: "tensorrt" or "tensorrt-rtx".
        module: its Python module.
    """

    def __init__(self, kind: str, module: Any) -> None:
        self.kind, self.title, self.module = kind, TITLES[kind], module
        self.version: str = module.__version__
        self.log = Log()
        self._logger = logger_for(module, self.log)
        self._runtime: Any = None
        self._plugins: set[Path] = set()

    @staticmethod
    @cache
    def open(kind: str) -> Library:
        """The installed one; the same for the whole process, because TensorRT knows one logger in a process.

        Raises:
            EngineError: it is not installed.
        """
        reasons = []
        for name in MODULES[kind]:
            try:
                return Library(kind, importlib.import_module(name))
            except (ImportError, OSError) as cause:  # OSError: its shared libraries are missing
                reasons.append(str(cause))
        raise EngineError(
            f"The {kind} engine needs {TITLES[kind]}, which is not installed ({reasons[0]:.200}). "
            f"Install it with: pip install 'flashnext-trt[{kind}]'"
        )

    def load_plugins(self, path: Path) -> None:
        """Register a plugin library's creators, once.

        Raises:
            EngineError: TensorRT cannot load it.
        """
        if path in self._plugins:
            return
        mark = self.log.mark()
        if self.module.get_plugin_registry().load_library(str(path)) is None:
            raise self.log.error(f"{self.title} cannot load the plugin library {path}", mark)
        self._plugins.add(path)

    def load(self, content: bytes, name: str) -> Plan:
        """A plan from its bytes; the GPU must be in use already.

        Raises:
            EngineError: TensorRT refuses it.
        """
        mark = self.log.mark()
        if self._runtime is None:
            self._runtime = self.module.Runtime(self._logger)
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise self.log.error(f"{self.title} cannot load {name}", mark, "Build the engine again.")
        return Plan(self, engine, name)


class Plan:
    """A deserialized plan."""

    def __init__(self, library: Library, engine: Any, name: str) -> None:
        self._library, self._engine, self.name = library, engine, name

    @property
    def profiles(self) -> int:
        """How many optimization profiles it has."""
        return int(self._engine.num_optimization_profiles)

    def tensors(self) -> dict[str, tuple[bool, str, tuple[int, ...]]]:
        """Whether it is an input, dtype, and shape (-1: dynamic) of each of its inputs and outputs."""
        module, engine = self._library.module, self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        return {
            name: (
                engine.get_tensor_mode(name) == module.TensorIOMode.INPUT,
                DTYPES.get(engine.get_tensor_dtype(name).name, engine.get_tensor_dtype(name).name),
                tuple(engine.get_tensor_shape(name)),
            )
            for name in names
        }

    def host_tensors(self) -> list[str]:
        """Inputs and outputs that it wants in host memory."""
        engine, device = self._engine, self._library.module.TensorLocation.DEVICE
        return [name for name in self.tensors() if engine.get_tensor_location(name) != device]

    def scratch_bytes(self) -> int:
        """Device memory that one context needs while it runs, whatever its profile."""
        return int(self._engine.device_memory_size_v2)

    def layers(self) -> str:
        """What the inspector says of the engine, as JSON (see inspection.py)."""
        inspector = self._engine.create_engine_inspector()
        text: str = inspector.get_engine_information(self._library.module.LayerInformationFormat.JSON)
        return text

    def context(self, profile: int, stream: int) -> Context:
        """An execution context for one profile, still without scratch memory.

        Raises:
            EngineError: TensorRT cannot make it.
        """
        mark = self._library.log.mark()
        strategy = self._library.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise self._library.log.error(f"{self._library.title} cannot prepare {self.name}", mark)
        return Context(self._library, context, f"{self.name}, profile {profile}", frozenset(self.tensors()))


class Context:
    """An execution context; shapes and addresses are set only where they change, and checked.

    What the plan has no use for (`tensors` are those it has) is passed over.
    """

    def __init__(self, library: Library, context: Any, name: str, tensors: frozenset[str]) -> None:
        self._library, self._context, self.name, self._tensors = library, context, name, tensors
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_scratch(self, memory: Memory) -> None:
        """Give it scratch memory."""
        self._context.set_device_memory(memory.address, memory.nbytes)

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        """Of an input with a dynamic shape."""
        shape = tuple(shape)
        if self._shapes.get(name) != shape and name in self._tensors:
            self._try(f"the shape {list(shape)} of {name}", "set_input_shape", name, shape)
            self._shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        """Of any input or output."""
        if self._addresses.get(name) != address and name in self._tensors:
            self._try(f"an address of {name}", "set_tensor_address", name, address)
            self._addresses[name] = address

    def execute(self, stream: int) -> None:
        """Queue one run."""
        self._try("a step", "execute_async_v3", stream)

    def capturable(self, stream: int) -> bool:
        """Whether a run can be captured as a graph now; TensorRT for RTX may still be compiling kernels."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))

    def _try(self, what: str, method: str, *arguments: Any) -> None:
        mark = self._library.log.mark()
        if not getattr(self._context, method)(*arguments):
            raise self._library.log.error(f"{self._library.title} refuses {what} ({self.name})", mark)
