"""The bundle's manifest: what the graphs are called, what goes in and out, and where the weights lie.

A bundle is a folder with `manifest.json`, the graphs and the tokenizer's files. The weights stay in the checkpoint;
the manifest names the checkpoint tensors by which graph inputs are filled and how the host finds n-gram rows. It is
plain data (no torch, no onnx), read by the runtime and by tools. A manifest is data from strangers: `Manifest.read`
checks types, sizes and that no file leaves the folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.export.config import ModelConfig
from flashnext.export.errors import BundleError, ConfigError
from flashnext.export.versioned_json import VersionedJson

FORMAT_VERSION = 2
FILE_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
FILE = VersionedJson("a bundle's manifest", FORMAT_VERSION, MAX_MANIFEST_BYTES, BundleError, "Export the bundle again.")

Size = int | str
"""A dimension: fixed, or the name of one that a step chooses: B sequences, S tokens, N rows of logits."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    `role` says who fills it: "step" (the runtime, every step), "rows" (the n-gram row source), "edge" (another graph),
    "weight" (bound once, see `WeightSpec`), "state" (bound once, in place), "output".
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    role: str


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX graph. `states` maps each state input to the output that is bound to the same memory.

    `sha256` is the hash of the file, by which a damaged or exchanged one is noticed when it is loaded.
    """

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: Mapping[str, str]
    sha256: str = ""

    def input(self, name: str) -> TensorSpec:
        return next(t for t in self.inputs if t.name == name)


@dataclass(frozen=True)
class WeightSpec:
    """A graph input that is filled from the checkpoint once.

    `sources` are checkpoint tensor names (prefix stripped). One name without "{e}" is that tensor's own bytes, mapped
    and reshaped. Names with "{e}" are read for each expert e in turn and stacked: [gate, up] gives [E, 2, I, H].
    `dtype` is what the graph takes; a tensor stored otherwise is converted once when it is bound, but 8-bit codes that
    the graph takes as "uint8" keep their bits. `is_scale`: every value must be finite and above zero.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    is_scale: bool = False


@dataclass(frozen=True)
class NgramSpec:
    """How the host finds the rows of one n-gram layer (design: ids never enter a graph).

    `input` is the body's input that takes the rows. `multipliers` [ngram_size], `head_sizes` and `head_offsets`
    [ngram heads] are int64 values of the checkpoint. `shards` are the table's tensors in order of their rows.

    `form` is "plain", "fp8" (E4M3 codes; value = code * scale) or "nvfp4" (packed E2M1 codes; value = code * row scale
    of its 16 columns * scale). `scale` names the tensor with the one scale, `row_scales` those by row, one per shard.
    """

    layer: int
    input: str
    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    heads_per_ngram: int
    eos: int
    columns: int
    rows: int
    shards: tuple[str, ...]
    form: str = "plain"
    scale: str = ""
    row_scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointRef:
    """Which checkpoint the bundle was made from: `path` (absolute) and SHA-256 `identity` (see checkpoint.identity)."""

    path: str
    identity: str
    common_parent: str
    """Real folder that the graphs' external data locations are relative to."""
    files: tuple[str, ...] = ()
    """Those locations."""


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime needs to know about a bundle besides the graphs themselves."""

    config: ModelConfig
    dtype: str
    window: int
    capacity: int
    slots: int
    residual_dtype: str
    """dtype of the residual branches, between graphs too: that of the activations, or "float8_e4m3fn"."""
    checkpoint: CheckpointRef
    graphs: Mapping[str, GraphSpec]
    weights: tuple[WeightSpec, ...]
    ngrams: tuple[NgramSpec, ...]
    ops: Mapping[str, int]
    residual_mode: str = "plain"
    """"plain", or where the scales of FP8 branches come from: "static" or "dynamic"."""
    residual_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Static scales by store and branch; the graphs hold the same as constants."""
    recurrent_dtype: str = "float32"
    """dtype of GatedDeltaNet's recurrent states."""
    kv_cache_dtype: str = "auto"
    """Of keys and values: "auto" (that of the activations), or "fp8" (codes) with the scales of each layer's."""
    kv_cache_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """[key, value] by layer; the graphs hold the same as constants."""
    tokenizer_files: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a text: generation_config.json's eos list and the tokenizer's own eos."""
    sampling_defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    """temperature, top_k, top_p, … of generation_config.json."""
    producer: str = ""
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into the folder."""
        raw = dataclasses.asdict(self)
        raw["config"] = self.config.to_dict()
        (folder / FILE_NAME).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read and check a bundle's manifest.

        Raises:
            BundleError: no manifest, another format version, a wrong type, or a file outside the folder.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise BundleError(
                f"{folder} is not a bundle (no {FILE_NAME}). Make one with: flashnext export CKPT {folder}"
            )
        raw = FILE.read(path)
        try:
            with FILE.parsing(path):
                manifest = _from_raw(raw)
        except ConfigError as fault:
            raise BundleError(f"{path} cannot be used. {fault}") from None
        from flashnext.export.graphs.manifest_checks import check_manifest  # which needs the classes of this module

        check_manifest(manifest, path)
        return manifest


def _spec(raw: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(
        _text(raw["name"]), _text(raw["dtype"]), tuple(_size(d) for d in raw["shape"]), _text(raw["role"])
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.60}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise TypeError(f"expected a whole number, found {value!r:.60}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, float):
        raise TypeError(f"expected a number, found {value!r:.60}")
    return value


def _pair(values: Any) -> tuple[float, float]:
    first, second = values
    return _number(first), _number(second)


def _size(value: Any) -> Size:
    return value if isinstance(value, str) else _whole(value)


def _from_raw(raw: Mapping[str, Any]) -> Manifest:
    graphs = {
        _text(k): GraphSpec(
            _text(g["file"]),
            tuple(_spec(t) for t in g["inputs"]),
            tuple(_spec(t) for t in g["outputs"]),
            {_text(a): _text(b) for a, b in g["states"].items()},
            _text(g["sha256"]),
        )
        for k, g in raw["graphs"].items()
    }
    return Manifest(
        config=ModelConfig.from_dict(raw["config"]),
        dtype=_text(raw["dtype"]),
        window=_whole(raw["window"]),
        capacity=_whole(raw["capacity"]),
        slots=_whole(raw["slots"]),
        residual_dtype=_text(raw["residual_dtype"]),
        residual_mode=_text(raw["residual_mode"]),
        residual_scales={_text(k): tuple(map(_number, v)) for k, v in raw["residual_scales"].items()},
        recurrent_dtype=_text(raw.get("recurrent_dtype", "float32")),
        kv_cache_dtype=_text(raw.get("kv_cache_dtype", "auto")),
        kv_cache_scales={_text(k): _pair(v) for k, v in raw.get("kv_cache_scales", {}).items()},
        checkpoint=_checkpoint(raw["checkpoint"]),
        graphs=graphs,
        weights=tuple(_weight(w) for w in raw["weights"]),
        ngrams=tuple(_ngram(n) for n in raw["ngrams"]),
        ops={_text(k): _whole(v) for k, v in raw["ops"].items()},
        tokenizer_files=tuple(map(_text, raw["tokenizer_files"])),
        stop_token_ids=tuple(map(_whole, raw["stop_token_ids"])),
        sampling_defaults=dict(raw["sampling_defaults"]),
        producer=_text(raw["producer"]),
    )


def _weight(raw: Mapping[str, Any]) -> WeightSpec:
    return WeightSpec(
        name=_text(raw["name"]),
        dtype=_text(raw["dtype"]),
        shape=tuple(map(_whole, raw["shape"])),
        sources=tuple(map(_text, raw["sources"])),
        is_scale=_flag(raw["is_scale"]),
    )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {value!r:.60}")
    return value


def _checkpoint(raw: Mapping[str, Any]) -> CheckpointRef:
    texts = {name: _text(raw[name]) for name in ("path", "identity", "common_parent")}
    return CheckpointRef(**texts, files=tuple(map(_text, raw["files"])))


def _ngram(raw: Mapping[str, Any]) -> NgramSpec:
    return NgramSpec(
        layer=_whole(raw["layer"]),
        input=_text(raw["input"]),
        multipliers=tuple(map(_int64, raw["multipliers"])),
        head_sizes=tuple(map(_whole, raw["head_sizes"])),
        head_offsets=tuple(map(_whole, raw["head_offsets"])),
        heads_per_ngram=_whole(raw["heads_per_ngram"]),
        eos=_whole(raw["eos"]),
        columns=_whole(raw["columns"]),
        rows=_whole(raw["rows"]),
        shards=tuple(map(_text, raw["shards"])),
        form=_text(raw["form"]),
        scale=_text(raw["scale"]),
        row_scales=tuple(map(_text, raw["row_scales"])),
    )


def _int64(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"expected an int64, found {value!r:.60}")
    return value
