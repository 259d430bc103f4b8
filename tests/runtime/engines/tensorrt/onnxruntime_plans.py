"""TensorRT's runtime played by ONNX Runtime: real numbers through the engine's real calls, on a machine without a GPU.

A "plan" is a small JSON text that names a bundle's graph and its profiles. Its execution is the portable graph in ONNX
Runtime, on the memory whose addresses were set: when `execute_async_v3` is called, shapes and addresses are those of
that moment, and the work is put on the stream of a `HostDevice`, which runs it when it likes. Whatever TensorRT would
refuse is refused here, with a line in the log. The classes have TensorRT's names, methods and parameters, which
test_tensorrt_calls.py holds to the installed bindings.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.tensorrt.host_device import HostDevice

__version__ = VERSION = "11.4.0.106"
module = sys.modules[__name__]
device: HostDevice | None = None
"""Whose streams runs are queued on; set by the tests."""
enqueued = 0
loaded_libraries: list[str] = []
SCRATCH_BYTES = 4096
ALIGNMENT = 256


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None: ...

    def log(self, severity: Severity, msg: str) -> None: ...


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


class TensorIOMode(IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class LayerInformationFormat(IntEnum):
    ONELINE = 0
    JSON = 1


DTYPES = {
    "float32": DataType.FLOAT,
    "bfloat16": DataType.BF16,
    "int32": DataType.INT32,
    "uint8": DataType.UINT8,
    "float8_e4m3fn": DataType.FP8,
}
SESSIONS: dict[str, ort.InferenceSession] = {}
ONNX_TYPES = {"bfloat16": 16, "float8_e4m3fn": 17}
"""ONNX's numbers of the dtypes that ONNX Runtime cannot tell from a numpy array."""


def session(sha256: str, graph: Path, weights: str) -> ort.InferenceSession:
    """A portable graph; one session for all copies of a bundle, since loading is what takes time."""
    if sha256 in SESSIONS:
        return SESSIONS[sha256]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", weights)
    SESSIONS[sha256] = ort.InferenceSession(graph.read_bytes(), options, ["CPUExecutionProvider"])
    return SESSIONS[sha256]


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            return ICudaEngine(json.loads(bytes(serialized_engine)), self._logger)
        except ValueError:
            self._logger.log(Severity.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (magic tag)")
            return None


class ICudaEngine:
    def __init__(self, plan: Mapping[str, Any], logger: ILogger) -> None:
        self.plan, self.logger = plan, logger
        bundle = Path(plan["bundle"])
        manifest = Manifest.read(bundle)
        self.spec: GraphSpec = manifest.graphs[plan["graph"]]
        self.extra = {name: (DTYPES[dtype], tuple(shape)) for name, dtype, shape in plan["extra"]}
        """Inputs that ONNX Runtime knows nothing of: weights that are initializers in the bundle's graph."""
        self.tensors = [*((t, True) for t in self.spec.inputs), *((t, False) for t in self.spec.outputs)]
        self.session = session(self.spec.sha256, bundle / self.spec.file, manifest.checkpoint.common_parent)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors) + len(self.extra)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.plan["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH_BYTES

    def get_tensor_name(self, index: int) -> str:
        return [*(t.name for t, _ in self.tensors), *self.extra][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.extra or self.find(name)[1] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        if name in self.extra:
            return self.extra[name][0]
        return DTYPES[self.plan["codes"].get(name, self.find(name)[0].dtype)]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self.extra:
            return self.extra[name][1]
        shape = [-1 if isinstance(d, str) else d for d in self.find(name)[0].shape]
        return (*shape[:-1], shape[-1] // 4) if self.plan["codes"].get(name) == "int32" else tuple(shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in self.plan.get("in_host", ()) else TensorLocation.DEVICE

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext:
        return IExecutionContext(self)

    def create_engine_inspector(self) -> EngineInspector:
        names = [{"Name": t.name} for t, _ in self.tensors]
        plugin = {"Name": "everything", "LayerType": "PluginV3", "Inputs": names, "Outputs": []}
        return EngineInspector(self.plan.get("layers", [plugin]))

    def find(self, name: str) -> tuple[TensorSpec, bool]:
        return next((t, is_input) for t, is_input in self.tensors if t.name == name)


class EngineInspector:
    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format == LayerInformationFormat.JSON
        return json.dumps({"Layers": list(self._layers), "I/O Tensors": []})


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile: Mapping[str, Any] | None = None
        self._scratch = (0, 0)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = self._engine.plan["profiles"][profile_index]
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        self._scratch = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        low, _, high = self._profile.get(name, ([], [], []))
        if len(shape) != len(low) or not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return self._refuse(f"IExecutionContext::setInputShape: {name} {shape} is not in {low} … {high}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if not memory or memory % ALIGNMENT:
            return self._refuse(f"IExecutionContext::setTensorAddress: {name} is at {memory:#x}")
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        global enqueued
        spec = self._engine.spec
        if self._scratch[1] < SCRATCH_BYTES:
            return self._refuse("IExecutionContext::enqueueV3: no device memory was set")
        if self._engine.plan.get("fails"):
            return self._refuse(self._engine.plan["fails"])
        sizes: dict[str, int] = {}
        for t in spec.inputs:
            if any(isinstance(d, str) for d in t.shape):
                if t.name not in self._shapes:
                    return self._refuse(f"IExecutionContext::enqueueV3: the shape of {t.name} was not set")
                sizes |= {d: n for d, n in zip(t.shape, self._shapes[t.name], strict=True) if isinstance(d, str)}
        names = {t.name for t in (*spec.inputs, *spec.outputs)} | self._engine.extra.keys()
        if missing := names - self._addresses.keys():
            return self._refuse(f"IExecutionContext::enqueueV3: no address of {min(missing)}")
        same = {self._addresses[a] == self._addresses[b] for a, b in spec.states.items()}
        if same - {self._engine.plan["in_place"]}:
            return self._refuse("IExecutionContext::enqueueV3: an aliased output is not at its input's address")
        enqueued += 1
        host, addresses, scratch = device, dict(self._addresses), self._scratch[0]
        assert host is not None
        host.queue(stream_handle, lambda: self._work(host, addresses, sizes, scratch))
        return True

    def _work(self, device: HostDevice, addresses: Mapping[str, int], sizes: Mapping[str, int], scratch: int) -> None:
        """One run of the graph on the memory at these addresses."""
        device.check_live(scratch, SCRATCH_BYTES)
        ctypes.memset(scratch, 0xFF, SCRATCH_BYTES)
        binding = self._engine.session.io_binding()
        kept = []
        for spec, is_input in self._engine.tensors:
            shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
            array = view(addresses[spec.name], shape, numpy_dtype(spec.dtype))
            device.check_live(addresses[spec.name], array.nbytes)
            value = ort_value(array)
            kept.append((array, value))
            (binding.bind_ortvalue_input if is_input else binding.bind_ortvalue_output)(spec.name, value)
        self._engine.session.run_with_iobinding(binding)

    def _refuse(self, reason: str) -> bool:
        self._engine.logger.log(Severity.ERROR, reason)
        return False


class IPluginRegistry:
    def load_library(self, plugin_path: str) -> object | None:
        loaded_libraries.append(plugin_path)
        return object()


def get_plugin_registry() -> IPluginRegistry:
    return IPluginRegistry()


def view(address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The memory at an address as an array."""
    nbytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype).reshape(shape)


def ort_value(array: np.ndarray[Any, Any]) -> ort.OrtValue:
    """An OrtValue over the array's memory."""
    if array.dtype.name not in ONNX_TYPES:
        return ort.OrtValue.ortvalue_from_numpy(array)
    bits = array.view({1: np.uint8, 2: np.uint16}[array.dtype.itemsize])
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_TYPES[array.dtype.name])
