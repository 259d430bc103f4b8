"""The `onnxruntime` engine: states updated in place, on the CPU or on the device of an execution provider.

Each state's input and output are bound to one buffer, so a step copies no state. The graph is loaded from bytes and
its weights from the checkpoint's files, which a session option names. On the CPU an array is bound by address: whoever
owns it keeps it, the engine only keeps a reference. On a device it is copied once and lives on there. Graphs run in
portable form, or in plugin form for the provider that knows plugins (`onnxruntime_providers.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import NO_THREADS, EngineError
from flashnext.export.files import plain
from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec
from flashnext.runtime.engines.base import MOST_THREADS, Array, numpy_dtype
from flashnext.runtime.engines.graph_files import read_graph
from flashnext.runtime.engines.onnxruntime_providers import PLUGIN_DOMAIN, TENSORRT, Provider, Providers, over
from flashnext.runtime.engines.sites import watched_spec
from flashnext.runtime.mapped_files.files import MappedFiles


class OnnxRuntimeEngine:
    """One graph of a bundle in an ONNX Runtime session."""

    def __init__(
        self,
        graph: str,
        bundle: Path,
        manifest: Manifest,
        checkpoint: Checkpoint,
        threads: int | None,
        *,
        watch: bool = False,
        providers: Sequence[Provider] | None = None,
    ) -> None:
        chosen = Providers.of(providers)
        if manifest.dtype != "float32" and not chosen.uses_plugins:
            raise EngineError(
                f"The bundle computes in {manifest.dtype}, for which ONNX Runtime lacks kernels. "
                f"Export it with --dtype float32, or choose the torch engine, or the provider {TENSORRT}."
            )
        _check_files(manifest, checkpoint)
        self._files = MappedFiles.of(checkpoint)
        self.spec: GraphSpec = manifest.graphs[graph]
        path = bundle / self.spec.file
        model = read_graph(path, self.spec)
        if watch:
            model = _watched(model, manifest, graph)
            self.spec = watched_spec(manifest, graph)
        self._codes: Mapping[str, str] = {}
        if chosen.uses_plugins:
            model, self._codes = _with_plugins(model)
        try:
            self._session = chosen.session(model, _session_options(checkpoint.common_parent, threads))
        except EngineError:
            raise
        except Exception as cause:
            if "pthread_create failed" in str(cause):
                raise EngineError(f"ONNX Runtime cannot load {path}. {NO_THREADS}") from cause
            reason = plain(str(cause).splitlines()[0]).rstrip(".")
            raise EngineError(f"ONNX Runtime cannot load {path}: {reason}. Export the bundle again.") from cause
        _check_ports(self.spec, self._session, path)
        self._inputs = {t.name: t for t in self.spec.inputs}
        self._outputs = [t for t in self.spec.outputs if t.role != "state"]
        self._bound: dict[str, tuple[Array, ort.OrtValue]] = {}
        self._memory = chosen.memory()
        self.states_elsewhere = not self._memory.is_host
        self._binding = self._session.io_binding()

    def bind(self, tensors: Mapping[str, Array]) -> None:
        """See `Engine.bind`."""
        for name, array in tensors.items():
            if name not in self._inputs:
                continue
            spec = self._inputs[name]
            _check(spec, array)
            value = self._memory.bound(array.view(numpy_dtype(self._codes.get(name, spec.dtype))))
            self._bound[name] = (array, value)
            self._binding.bind_ortvalue_input(name, value)
            if name in self.spec.states:
                self._binding.bind_ortvalue_output(self.spec.states[name], value)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """See `Engine.run`."""
        sizes: dict[str, int] = {}
        kept = []
        for name, array in feeds.items():
            spec = self._inputs[name]
            _check(spec, array)
            sizes.update({d: n for d, n in zip(spec.shape, array.shape, strict=True) if isinstance(d, str)})
            kept.append(over(array))
            self._binding.bind_ortvalue_input(name, kept[-1])
        outputs = {t.name: _empty(t, sizes) for t in self._outputs}
        for name, array in outputs.items():
            kept.append(over(array))
            self._binding.bind_ortvalue_output(name, kept[-1])
        with self._files:
            try:
                self._session.run_with_iobinding(self._binding)
            except Exception as cause:
                raise EngineError(f"ONNX Runtime failed on {self.spec.file}: {str(cause).splitlines()[0]}") from cause
        return outputs


def _watched(model: bytes, manifest: Manifest, graph: str) -> bytes:
    """The graph with the outputs of its sites."""
    import onnx

    from flashnext.runtime.engines.watched_graph import watch

    watched: bytes = watch(onnx.load_from_string(model), manifest, graph).SerializeToString()
    return watched


def _with_plugins(model: bytes) -> tuple[bytes, Mapping[str, str]]:
    """The graph in plugin form, and the inputs whose bytes it takes as another dtype."""
    from flashnext.builder.plugin_graph import plugin_form

    made = plugin_form(model, domain=PLUGIN_DOMAIN)
    return made.model, made.codes


def _check_files(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """The graphs name the checkpoint's files; a copy of it may call them otherwise (a hub cache's `blobs/`)."""
    missing = [name for name in manifest.checkpoint.files if not (checkpoint.common_parent / name).is_file()]
    if missing:
        raise EngineError(
            f"The checkpoint at {checkpoint.folder} is the right one, but its files have other names than where the "
            f"bundle was made ({missing[0]} is not in {checkpoint.common_parent}). Export the bundle again from there: "
            "no weights are copied."
        )


def _session_options(weights: Path, threads: int | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    options.log_severity_level = 3
    if count := threads or _threads_of_environment():
        options.intra_op_num_threads = count
    return options


def _threads_of_environment() -> int:
    """OMP_NUM_THREADS, which may be a list for nested levels (`4,2`) or no number at all; 0: the engine's choice."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and len(first) < 5 and int(first) <= MOST_THREADS else 0


def _check_ports(spec: GraphSpec, session: ort.InferenceSession, path: Path) -> None:
    """The graph has the inputs and outputs that the manifest lists, or it is another one."""
    for listed, there in ((spec.inputs, session.get_inputs()), (spec.outputs, session.get_outputs())):
        if differing := {t.name for t in listed} ^ {t.name for t in there}:
            raise EngineError(
                f"{path} is not the graph that the manifest describes: it differs in {plain(min(differing))}. "
                "Export the bundle again."
            )


def _check(spec: TensorSpec, array: Array) -> None:
    fits = len(array.shape) == len(spec.shape) and all(
        isinstance(want, str) or want == have for want, have in zip(spec.shape, array.shape, strict=True)
    )
    if array.dtype != numpy_dtype(spec.dtype) or not fits or not array.flags.c_contiguous:
        raise EngineError(
            f"{spec.name} must be contiguous {spec.dtype} of shape {list(spec.shape)}, "
            f"found {array.dtype.name} of shape {list(array.shape)}."
        )


def _empty(spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    """Memory for an output: its sizes follow from the inputs of the step."""
    return np.empty([sizes[d] if isinstance(d, str) else d for d in spec.shape], numpy_dtype(spec.dtype))
