"""What a model stores in its FP8 residual, store by store, in either engine; and how two such runs differ.

PyTorch is watched through the table of references, ONNX Runtime by a second session on the same graph, with every
store among its outputs. Both get what the runner feeds, so a whole text runs end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.ops.ports import split_form
from flashnext.export.ops.reference import REFERENCES
from flashnext.export.residual_scales import store_names
from flashnext.runtime.engines import engine_set
from flashnext.runtime.engines.base import Engine
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.scoring import chunks

from .oracle import Array

RESIDUAL_OPS = ("GatedResidual", "NgramInjection")
E4M3_TYPE = onnx.TensorProto.FLOAT8E4M3FN
FOREIGN_TYPES = {"float8_e4m3fn": (np.uint8, E4M3_TYPE), "bfloat16": (np.uint16, onnx.TensorProto.BFLOAT16)}


@dataclass
class Run:
    """One text: logits [T, V], the draft layer's [T - 1, V], and by store the codes [T, n, H] as bytes."""

    logits: Array
    draft_logits: Array
    codes: dict[str, Array]


def run_text(bundle: Path, engine: str, tokens: Sequence[int], chunk: int, patch: pytest.MonkeyPatch) -> Run:
    """A text in chunks of this many tokens, then the draft layer on all of it."""
    stored: list[Array] = []
    with patch.context() as inside:
        if engine == "onnxruntime":
            _watch_onnxruntime(inside, stored)
        else:
            _watch_reference(inside, stored)
        runner = ModelRunner.open(bundle, engine=engine, threads=1)
        parts = [step for _, step in chunks(runner, 0, list(tokens), chunk, all_logits=True)]
        hidden = np.concatenate([step.hidden for step in parts], axis=1)[:, :-1]
        zero, count = np.zeros(1, np.int32), np.array([len(tokens) - 1], np.int32)
        rows = np.arange(count[0], dtype=np.int32)
        draft, _, _ = runner.mtp_step(np.array([tokens[1:]], np.int32), hidden, zero, zero, count, rows)
        names = store_names(runner.manifest.config)
        runner.close()
    return Run(np.concatenate([step.logits for step in parts]), draft, _by_store(stored, names, len(parts)))


def _by_store(stored: list[Array], names: Sequence[str], steps: int) -> dict[str, Array]:
    """The stores come in the model's order, once for each step of the main model and once in the draft layer."""
    main = sum(not name.startswith("mtp") for name in names)
    assert len(stored) == steps * main + len(names) - main
    columns = [[stored[step * main + i] for step in range(steps)] for i in range(main)]
    columns += [[codes] for codes in stored[steps * main :]]
    return {name: np.concatenate(parts, axis=1)[0] for name, parts in zip(names, columns, strict=True)}


# --- watching ---------------------------------------------------------------------------------------


def _watch_reference(patch: pytest.MonkeyPatch, stored: list[Array]) -> None:
    for op in RESIDUAL_OPS:
        for form, reference in REFERENCES[op].items():
            plain, mode = split_form(form)
            if mode and plain != "settled":
                patch.setitem(REFERENCES[op], form, _watched(reference, stored))


def _watched(reference: Any, stored: list[Array]) -> Any:
    def run(*inputs: torch.Tensor, **attributes: Any) -> Any:
        out = reference(*inputs, **attributes)
        stored.append(out[0].view(torch.uint8).numpy())
        return out

    return run


def _watch_onnxruntime(patch: pytest.MonkeyPatch, stored: list[Array]) -> None:
    opened = engine_set.open_engine

    def open_engine(
        kind: str, graph: str, bundle: Path, manifest: Manifest, checkpoint: Any, *more: Any, **named: Any
    ) -> Engine:
        engine = opened(kind, graph, bundle, manifest, checkpoint, *more, **named)
        return WatchedEngine(engine, bundle / manifest.graphs[graph].file, checkpoint.common_parent, stored)

    patch.setattr(engine_set, "open_engine", open_engine)


class WatchedEngine:
    """An engine whose graph runs a second time, on copies, to see its stores."""

    def __init__(self, engine: Engine, graph: Path, weights: Path, stored: list[Array]) -> None:
        self.spec: GraphSpec = engine.spec
        self._engine, self._stored = engine, stored
        self._bound: dict[str, Array] = {}
        model = onnx.load(graph, load_external_data=False)
        self._names = [n.output[0] for n in model.graph.node if n.op_type in RESIDUAL_OPS and _stores(n)]
        there = {output.name for output in model.graph.output}
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(name, E4M3_TYPE, None) for name in self._names if name not in there
        )
        options = ort.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def bind(self, tensors: Mapping[str, Array]) -> None:
        self._bound |= tensors
        self._engine.bind(tensors)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values = {name: _ort_value(array) for name, array in {**self._bound, **feeds}.items()}
        self._stored += [value.numpy() for value in self._session.run_with_ort_values(self._names, values)]
        return self._engine.run(feeds)


def _stores(node: onnx.NodeProto) -> bool:
    form = next(a.s.decode() for a in node.attribute if a.name == "form")
    return split_form(form)[0] != "settled"


def _ort_value(array: Array) -> ort.OrtValue:
    if array.dtype.name in FOREIGN_TYPES:
        bits, number = FOREIGN_TYPES[array.dtype.name]
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(bits), number)
    return ort.OrtValue.ortvalue_from_numpy(array)


# --- comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Codes of two runs. A code is *direct* while no code differs that could have changed its value: none of an earlier
    store at this token or before it. `largest_step` is the largest distance of direct codes, in codes."""

    codes: int
    differing: int
    direct: int
    direct_differing: int
    largest_step: int

    @property
    def share(self) -> float:
        return self.differing / self.codes

    @property
    def direct_share(self) -> float:
        return self.direct_differing / self.direct


def difference(first: Run, second: Run) -> Difference:
    touched = np.zeros(max(len(codes) for codes in first.codes.values()), bool)
    codes = differing = direct = direct_differing = largest = 0
    for name, a in first.codes.items():
        b = second.codes[name]
        differs, clean = a != b, ~touched[: len(a)]
        codes, differing = codes + a.size, differing + int(differs.sum())
        direct, direct_differing = direct + int(clean.sum()) * a[0].size, direct_differing + int(differs[clean].sum())
        steps = np.abs(_order(a) - _order(b))[clean]
        largest = max(largest, int(steps.max(initial=0)))
        changed = differs.any((1, 2))
        touched[: len(a)] |= np.logical_or.accumulate(changed)
    return Difference(codes, differing, direct, direct_differing, largest)


def _order(codes: Array) -> Array:
    """Codes by the size of their values, 0 and -0 the same."""
    magnitude = (codes & 0x7F).astype(int)
    return np.where(codes & 0x80, -magnitude, magnitude)


@contextmanager
def largest_scales(found: dict[str, Array], names: Sequence[str], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, PyTorch's dynamic scales are watched; afterwards `found` has the largest [n] of each store."""
    scales: list[Array] = []
    with patch.context() as inside:
        for op in RESIDUAL_OPS:
            for form, reference in REFERENCES[op].items():
                if form.endswith("dynamic") and not form.startswith("settled"):
                    inside.setitem(REFERENCES[op], form, _watched_scales(reference, scales))
        yield
    for name, scale in zip(names, scales, strict=True):
        found[name] = scale.max((0, 1))


def _watched_scales(reference: Any, scales: list[Array]) -> Any:
    def run(*inputs: torch.Tensor, **attributes: Any) -> Any:
        out = reference(*inputs, **attributes)
        scales.append(out[-1].numpy())
        return out

    return run
