"""Execution providers of ONNX Runtime: which are asked for, whether they are here, what they run and where.

    chosen = Providers.of([("CUDAExecutionProvider", {"device_id": 0})])

| provider | graphs | package |
| --- | --- | --- |
| CPUExecutionProvider | portable | onnxruntime, or any of the others |
| CUDAExecutionProvider | portable | onnxruntime-gpu |
| TensorrtExecutionProvider | with plugins (`trt_extra_plugin_lib_paths`) | onnxruntime-gpu, and TensorRT |
| NvTensorRTRTXExecutionProvider | portable | onnxruntime, and onnxruntime-ep-nv-tensorrt-rtx, which it registers |

The list's first provider decides where weights and states are. Only the first row has been run; without a GPU the
others are tested up to the calls of ONNX Runtime that need one.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import onnxruntime as ort

from flashnext.export.errors import EngineError, RequestError
from flashnext.export.files import plain

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, TENSORRT_RTX = "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
"""Both install the module `onnxruntime`, so that the later one silently wins."""
RTX_MODULE, RTX_PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx", "onnxruntime-ep-nv-tensorrt-rtx"
PLUGIN_PATHS = "trt_extra_plugin_lib_paths"
PLUGIN_DOMAIN = "trt.plugins"
"""Domain under which the TensorRT provider registers the creators that it finds."""
MOST_OPTIONS = 200

Provider = str | tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Providers:
    """A checked list: names and options as ONNX Runtime takes them, the preferred one first."""

    entries: tuple[tuple[str, Mapping[str, str]], ...]

    @classmethod
    def of(cls, providers: Sequence[Provider] | None) -> Providers:
        """Check a list of names and (name, options) pairs; none means the CPU.

        Raises:
            RequestError: something else than such a list.
            EngineError: a provider that is not available here, or a plugin library that is not there.
        """
        entries = tuple(map(_entry, _listed(providers)))
        names = [name for name, _ in entries]
        if len(set(names)) != len(names):
            raise RequestError(f"providers names {max(names, key=names.count)} twice; name each once.")
        if TENSORRT_RTX in names and set(names) - {TENSORRT_RTX, CPU}:
            raise RequestError(f"{TENSORRT_RTX} works with {CPU} alone beside it; leave the other providers out.")
        for name in names:
            _check_available(name)
        return cls(tuple((name, _with_plugins(options) if name == TENSORRT else options) for name, options in entries))

    @property
    def uses_plugins(self) -> bool:
        """Whether the graphs are run in plugin form. Its nodes mean nothing to other providers."""
        return any(name == TENSORRT for name, _ in self.entries)

    @property
    def device(self) -> tuple[str, int]:
        """Kind and number of the device that weights and states are on."""
        name, options = self.entries[0]
        if name == CPU:
            return "cpu", 0
        number = options.get("device_id", "0")
        if not number.isdecimal():
            raise RequestError(f"device_id = {number!r:.40} of {name} must be a whole number from 0.")
        return "cuda", int(number)

    def session(self, model: bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        """Open a session with them; errors are ONNX Runtime's own."""
        name, settings = self.entries[0]
        if name == TENSORRT_RTX:
            options.add_provider_for_devices(_rtx_devices(self.device[1]), dict(settings))
            return ort.InferenceSession(model, options)
        return ort.InferenceSession(model, options, [(name, dict(settings)) for name, settings in self.entries])

    def memory(self) -> Memory:
        """Where weights and states are kept."""
        kind, number = self.device
        if self.entries[0][0] != TENSORRT_RTX:
            return Memory(kind, number)
        (device,) = _rtx_devices(number)
        return Memory(kind, number, device.memory_info(ort.OrtDeviceMemoryType.DEFAULT))


# --- the list ---------------------------------------------------------------------------------------------------------


def _listed(providers: Any) -> Sequence[Any]:
    if providers is None or (isinstance(providers, Sequence) and not providers):
        return [CPU]
    if isinstance(providers, str) or not isinstance(providers, Sequence):
        raise RequestError(f'providers must be a list, such as ["{CUDA}"]; found {providers!r:.80}.')
    return providers


def _entry(provider: Any) -> tuple[str, dict[str, str]]:
    name, options = (provider, {}) if isinstance(provider, str) else _pair(provider)
    if not isinstance(name, str) or not isinstance(options, Mapping) or len(options) > MOST_OPTIONS:
        raise RequestError(
            f"A provider is a name, or a pair of a name and its options, such as "
            f'("{CUDA}", {{"device_id": 0}}); found {provider!r:.120}.'
        )
    return name, {str(key): str(value) for key, value in options.items()}


def _pair(provider: Any) -> tuple[Any, Any]:
    is_pair = isinstance(provider, Sequence) and len(provider) == 2
    return (provider[0], provider[1]) if is_pair else (None, None)


# --- what is here -----------------------------------------------------------------------------------------------------


def _check_available(name: str) -> None:
    available = ort.get_available_providers()
    if name in available or (name == TENSORRT_RTX and _rtx_library() is not None):
        return
    known = [*ort.get_all_providers(), TENSORRT_RTX]
    close = difflib.get_close_matches(name, known, n=1)
    if name not in known:
        hint = f" Did you mean {close[0]}?" if close else ""
        raise EngineError(
            f"ONNX Runtime has no provider {plain(name, 60)!r}.{hint} Available here: {_list(available)}."
        )
    raise EngineError(
        f"{name} is not available here: {_installed()} has {_list(available)}. {_remedy(name)} ({PACKAGES[0]} and "
        f"{PACKAGES[1]} install the same module; only one of them may be there.)"
    )


def _remedy(name: str) -> str:
    if name == TENSORRT_RTX:
        return f"Install it with: pip install {RTX_PACKAGE}, beside onnxruntime 1.24 or newer."
    if name in (CUDA, TENSORRT):
        return "Install it with: pip uninstall onnxruntime && pip install 'flashnext-trt[cuda]'"
    return "Install a build of ONNX Runtime that has it, or choose one of these."


def _installed() -> str:
    """Which packages gave the module, so far as they say."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " and ".join(found) or f"onnxruntime {ort.__version__}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))


# --- TensorRT: the plugin library -------------------------------------------------------------------------------------


def _with_plugins(options: Mapping[str, str]) -> dict[str, str]:
    """The options with the plugin library, found where `flashnext plugins build` puts it unless they name one.

    Raises:
        EngineError: a file that they name is not there.
        PluginError: there is no library.
    """
    from flashnext.plugins.tensorrt import library

    named = [path for path in options.get(PLUGIN_PATHS, "").split(";") if path]
    for path in named:
        if not Path(path).is_file():
            raise EngineError(
                f"{PLUGIN_PATHS} names {plain(path)}, which is not a file. Build the library with: flashnext plugins "
                "build, and find it with: flashnext plugins path"
            )
    return {**options, PLUGIN_PATHS: ";".join(named) or str(library.find().path)}


# --- TensorRT for RTX: a library of its own ---------------------------------------------------------------------------


def _rtx_library() -> Any:
    """The module that brings it, or None."""
    try:
        return importlib.import_module(RTX_MODULE)
    except ImportError:
        return None


def _rtx_devices(number: int) -> list[Any]:
    """The GPU of this number, as the provider's library lists them; the library is registered when first asked for.

    Raises:
        EngineError: it cannot be loaded, or finds no such GPU.
    """
    library = _rtx_library()
    name = library.get_ep_name()
    if not any(device.ep_name == name for device in ort.get_ep_devices()):
        try:
            ort.register_execution_provider_library(name, library.get_library_path())
        except Exception as cause:
            reason = plain(str(cause).splitlines()[0]).rstrip(".")
            raise EngineError(
                f"{RTX_PACKAGE} cannot be loaded here: {reason}. It needs a GPU and its driver."
            ) from None
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if number >= len(devices):
        raise EngineError(f"{TENSORRT_RTX} finds {len(devices)} GPUs here, and device_id {number} is asked for.")
    return devices[number : number + 1]


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """Makes the values that are bound: over an array's own memory on the CPU, elsewhere a copy of it on the device.

    There is one copy of an array for all graphs that bind it: two of them update the same states.
    """

    _COPIES: ClassVar[WeakValueDictionary[tuple[object, ...], ort.OrtValue]] = WeakValueDictionary()

    def __init__(self, kind: str, number: int, info: Any = None) -> None:
        self.is_host = kind == "cpu" and info is None
        self._key = (kind, number)
        where = {"device_type": kind, "device_id": number}
        self._place: dict[str, Any] = where if info is None else {"memory_info": info}

    def bound(self, array: Any) -> ort.OrtValue:
        """A value that stays bound: states are written there."""
        if self.is_host:
            return over(array)
        key = (*self._key, array.ctypes.data, array.shape, array.dtype.name)
        value = self._COPIES.get(key)
        if value is None:
            value = self._COPIES[key] = self.copied(array)
        return value

    def copied(self, array: Any) -> ort.OrtValue:
        """A copy in this memory."""
        kind = ONNX_TYPES.get(array.dtype.name, array.dtype)
        copy = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), kind, **self._place)
        copy.update_inplace(over(array))
        return copy


ONNX_TYPES = {"bfloat16": 16, "float8_e4m3fn": 17}
"""ONNX TensorProto.DataType values of the dtypes that numpy has no name of its own for."""
_BITS = {1: "uint8", 2: "uint16"}


def over(array: Any) -> ort.OrtValue:
    """A value over the array's own memory."""
    if array.dtype.name in ONNX_TYPES:
        bits = array.view(_BITS[array.dtype.itemsize])
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_TYPES[array.dtype.name])
    return ort.OrtValue.ortvalue_from_numpy(array)
