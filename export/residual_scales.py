"""Scales of an FP8 residual: which stores a model has, and `scales.json`, in which calibration hands them to export.

A *store* is an op that writes the residual branches: the embedding, each block's write, each n-gram injection (which
writes the pending block's output too: one store), and the draft layer's own. Each has one static scale per branch.

A file of scales is data from strangers: it is held to the checkpoint and to the model's stores, and refused with what
is wrong and how to mend it. It is plain data (no torch), written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.config import ModelConfig
from flashnext.export.errors import ScalesError
from flashnext.export.fields import FieldReader
from flashnext.export.files import plain, read_json_object, write_whole
from flashnext.export.versioned_json import VersionedJson

FORMAT_VERSION = 1
MAX_BYTES = 4 << 20
"""1,024 layers of 64 branches take less."""
FORMATS = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest value of each storage format."""
SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number: a product with a smaller scale may lose bits, or vanish."""
LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
BEYOND_FLOAT = 1e39
"""Stands for all larger numbers; JSON's integers may be longer than any float."""
MODES = ("plain", "static", "dynamic")
RESIDUAL_FORMS = ("plain", "fp8", "fp8-dynamic")
"""What a user may ask for; fp8 takes static scales from a file."""
DRAFT = "mtp.layers.0"
DRAFT_START = f"{DRAFT}.input"
REMEDY = "Calibrate this checkpoint with: flashnext calibrate CKPT --text … --out scales.json"
FILE = VersionedJson("a file of scales from flashnext calibrate", FORMAT_VERSION, MAX_BYTES, ScalesError, REMEDY)


def store_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of all stores in the order of the model; a store's index is its site number (stochastic rounding).

    `embedding`, then for each layer `layers.0.mixer` and `layers.0.mlp`. Before a layer with an n-gram injection,
    `layers.1.ngram` takes the place of `layers.0.mlp` (or of `embedding`), because the injection writes both. The draft
    layer stores its start `mtp.layers.0.input`, then `mtp.layers.0.mixer` and `mtp.layers.0.mlp`.
    """
    names = []
    for layer in range(config.num_hidden_layers):
        injected = layer in config.ngram_layers
        names += [f"layers.{layer}.ngram" if injected else store_before(layer), f"layers.{layer}.mixer"]
    names.append(last_store(config))
    return (*names, *((DRAFT_START, f"{DRAFT}.mixer", f"{DRAFT}.mlp") if config.has_mtp else ()))


def store_before(layer: int) -> str:
    """What a layer's first Gated Residual writes where no n-gram injection does: the block before, or the start."""
    return f"layers.{layer - 1}.mlp" if layer else "embedding"


def last_store(config: ModelConfig) -> str:
    """The store whose branches go to the final Gated Residual and to the draft layer."""
    return f"layers.{config.num_hidden_layers - 1}.mlp"


@dataclass(frozen=True)
class ResidualStorage:
    """How a model keeps its residual branches: `mode` "plain" (in the activations' dtype), or E4M3 with "static"
    scales (one per store and branch) or "dynamic" ones (one per token and branch)."""

    mode: str = "plain"
    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_fp8(self) -> bool:
        return self.mode != "plain"

    def faults(self, config: ModelConfig) -> Iterator[str]:
        """What keeps a model from being stored this way."""
        if self.mode not in MODES:
            yield f"the residual's mode is {self.mode!r:.40}, expected one of {', '.join(MODES)}"
        else:
            yield from scale_faults(config, self.mode, "e4m3", self.scales)


@dataclass(frozen=True)
class CalibrationText:
    """What the scales were found on: SHA-256 of the token ids, number and length of sequences, seed of the choice."""

    sha256: str
    sequences: int
    length: int
    seed: int


@dataclass(frozen=True)
class ResidualScales:
    """The contents of `scales.json`.

    `checkpoint` is the checkpoint's identity (`checkpoint.identity`), `method` how the scales were chosen ("max",
    "percentile", …), `mode` "static" or "dynamic" (then there are no scales), `format` "e4m3" or "e5m2". `scales` has
    for each store a float32 value per branch: value = code * scale.
    """

    checkpoint: str
    method: str
    mode: str
    format: str
    text: CalibrationText
    scales: Mapping[str, tuple[float, ...]]
    producer: str = ""
    format_version: int = FORMAT_VERSION

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            ScalesError: the file cannot be written, or would replace something else than a file of scales.
        """
        path = Path(path)
        check_replaceable(path)
        try:
            write_whole(path, json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n")
        except OSError as cause:
            raise ScalesError(f"{path} cannot be written ({cause.strerror or cause}). Name another file.") from None

    def check(self, config: ModelConfig, identity: str, source: str | Path = "scales") -> None:
        """Hold the scales to a model and its checkpoint.

        Raises:
            ScalesError: of another checkpoint; a store is absent or unknown; a wrong number of branches; a value that
                is no scale. All faults of the values are counted, the first is named.
        """
        if self.checkpoint != identity:
            raise ScalesError(
                f"{source} belongs to another checkpoint (identity {plain(self.checkpoint, 16)}, "
                f"this one is {identity[:16]}…). {REMEDY}"
            )
        faults = list(scale_faults(config, self.mode, self.format, self.scales))
        if faults:
            more = f" ({len(faults):,} faults in all)" if len(faults) > 1 else ""
            raise ScalesError(f"{source} cannot be used: {faults[0]}{more}. {REMEDY}")


def scale_faults(config: ModelConfig, mode: str, form: str, scales: Mapping[str, tuple[float, ...]]) -> Iterator[str]:
    """What is wrong with scales for a model, fault by fault; modes but "static" have none."""
    wanted = store_names(config) if mode == "static" else ()
    for name in wanted:
        if name not in scales:
            yield f"the store {name} has no scales"
    for name, values in scales.items():
        if name not in wanted:
            yield f"{plain(name, 80)!r} is not a store of this model in {mode} mode"
        elif len(values) != config.hc_count:
            yield f"the store {name} has {len(values)} scales, the model {config.hc_count} branches"
        for branch, value in enumerate(values):
            if fault := scale_fault(value, form):
                yield f"the scale of branch {branch} at {plain(name, 80)} is {value!r}: {fault}"


def scale_fault(value: float, form: str = "e4m3") -> str:
    """What is wrong with a number as a scale of this format; "" when nothing is."""
    if not value > 0:
        return "a scale is above zero"
    if value < SMALLEST_SCALE:
        return f"a scale below {SMALLEST_SCALE:.3g} loses bits"
    largest = LARGEST_FLOAT / FORMATS[form]
    return "" if value <= largest else f"a scale above {largest:.3g} stands for infinite values"


def check_replaceable(path: Path) -> None:
    """Scales replace earlier scales and nothing else: not the text they come from, no checkpoint's file, no device.

    Raises:
        ScalesError: something else is at this path.
    """
    if not path.exists():
        return
    try:
        known = {"format_version", "scales"} <= read_json_object(path, ScalesError, "scales", MAX_BYTES).keys()
    except ScalesError:
        known = False
    if not known:
        raise ScalesError(f"{path} exists and is no file of scales. Name another file, or remove this one.")


# --- reading ------------------------------


def read_scales(path: str | Path, config: ModelConfig, identity: str) -> ResidualScales:
    """Read a file of scales and hold it to a model and its checkpoint (`identity`, see `checkpoint.identity`).

    Raises:
        ScalesError: not a file of scales of this version, or what `ResidualScales.check` refuses.
    """
    path = Path(path)
    raw = FILE.read(path)
    try:
        scales = _from_raw(raw)
    except (TypeError, ValueError) as fault:
        raise ScalesError(f"{path} cannot be used: {plain(str(fault))}. {REMEDY}") from None
    scales.check(config, identity, path)
    return scales


def _from_raw(raw: dict[str, Any]) -> ResidualScales:
    texts = {name: _text(raw, name) for name in ("checkpoint", "method", "mode", "format", "producer")}
    for name, allowed in (("mode", ("static", "dynamic")), ("format", tuple(FORMATS))):
        if texts[name] not in allowed:
            raise ValueError(f"{name} is {texts[name]!r:.40}, expected one of {', '.join(allowed)}")
    scales = raw.get("scales")
    if not isinstance(scales, dict):
        raise TypeError(f"scales must be an object, found {scales!r:.40}")
    values = {name: _numbers(name, of_store) for name, of_store in scales.items()}
    known: dict[str, Any] = {**texts, "text": _calibration_text(raw.get("text")), "scales": values}
    return ResidualScales(**known)


def _calibration_text(raw: Any) -> CalibrationText:
    if not isinstance(raw, dict):
        raise TypeError(f"text must be an object, found {raw!r:.40}")
    reader = FieldReader(raw)
    found = CalibrationText(
        sha256=_text(raw, "sha256"),
        sequences=reader.integer("sequences"),
        length=reader.integer("length"),
        seed=reader.integer("seed", low=0, high=1 << 62),
    )
    if reader.faults:
        raise ValueError("text: " + "; ".join(reader.faults))
    return found


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise TypeError(f"{name} must be a short text, found {value!r:.40}")
    return value


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """One store's scales, rounded to float32 (whose values they are)."""
    if not isinstance(values, list):
        raise TypeError(f"the store {name!r:.80} must have a list of scales, found {values!r:.40}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"the store {name!r:.80} has the scale {value!r:.40}, expected a number")
    with np.errstate(over="ignore"):
        return tuple(float(np.float32(max(min(value, BEYOND_FLOAT), -BEYOND_FLOAT))) for value in values)
