"""Open a checkpoint folder: configuration, headers of all shards, every tensor checked; weights stay on disk.

    checkpoint = Checkpoint.open(folder, notes=print)
    checkpoint.config, checkpoint.tensors["embed_tokens.weight"], checkpoint.array("layers.0.linear_attn.A_log")

Opening reads headers only (and the few integers of the n-gram hash). All faults of the tensors are reported together,
because a user who converts a checkpoint wants the whole list, not the first entry of it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashnext.export.checkpoint import quantization
from flashnext.export.checkpoint.forms import FP8_BLOCK, NVFP4, Forms
from flashnext.export.checkpoint.layout import MTP_LAYER, expected_tensors, layout_faults
from flashnext.export.checkpoint.ngram_table import ngram_spec
from flashnext.export.checkpoint.quantized_layout import FLOATS
from flashnext.export.checkpoint.safetensors_file import TensorInfo, map_file, shown, tensor_view
from flashnext.export.checkpoint.shards import read_tensors
from flashnext.export.config import ModelConfig, read_config
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.export.kv_cache import ENDS, Scales, chosen, scale_names
from flashnext.export.residual_scales import scale_fault

PREFIXES = ("model.language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
ACTIVATION_SCALES = (".input_scale",)
"""What ModelOpt stores for quantized activations."""
CACHE_SCALES = tuple(f".{end}" for end in ENDS)
"""Likewise for keys and values."""
MAX_LISTED_FAULTS = 20
"""Lines of an error for each kind of fault."""

Notes = Callable[[str], None]


class Checkpoint:
    """A checkpoint whose files are sound and whose tensors form the model of its configuration.

    `tensors` maps prefix-stripped names to where they lie, `cache_scales` those of the scales of keys and values (which
    are no part of the model); `common_parent` is the real folder above all weight files.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        tensors: Mapping[str, TensorInfo],
        cache_scales: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.cache_scales = cache_scales or {}
        self.common_parent = Path(os.path.commonpath({str(t.file.parent) for t in tensors.values()}))
        self.forms = _forms(tensors)
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}
        self._ngrams: dict[int, NgramSpec] = {}

    @classmethod
    def open(cls, folder: str | Path, notes: Notes | None = None) -> Checkpoint:
        """Read and check a checkpoint folder; `notes` gets a line for whatever is left out on purpose.

        Raises:
            ConfigError: `config.json` is absent, malformed or of another model.
            CheckpointError: damaged or missing files, or tensors that do not form the model (all listed).
        """
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; expected a checkpoint folder with config.json and weights.")
        notes = notes or (lambda line: None)
        said = read_config(path)
        config, declared = ModelConfig.from_dict(said), quantization.declared(path, said)
        raw, faults = read_tensors(path)
        _raise_faults(path, faults)
        caches = _strip(path, {n: t for n, t in raw.items() if n.endswith(CACHE_SCALES)})
        tensors, config = _select(path, raw, config, notes)
        _raise_faults(path, *layout_faults(expected_tensors(config, _forms(tensors)), tensors))
        checkpoint = cls(path, config, tensors, caches)
        contradictions, remarks = quantization.compare(declared, checkpoint._module_forms())
        _raise_faults(path, contradictions, checkpoint._read_ngrams())
        for remark in remarks:
            notes(remark)
        return checkpoint

    @property
    def expert_layout(self) -> Literal["fused", "per_expert"]:
        """How the main model's routed experts are stored (each layer's own layout is in `expert_sources`)."""
        return "per_expert" if "layers.0" in self.forms.per_expert else "fused"

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only mapped array of its own dtype (bfloat16 and float8 from ml_dtypes)."""
        return self._array(self.tensors[name])

    def _array(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        if info.file not in self._maps:
            self._maps[info.file] = map_file(info.file)
        return tensor_view(self._maps[info.file], info)

    def expert_sources(self, layer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`WeightSpec.sources` of a layer's ("layers.3", "mtp.layers.0") gate_up and down expert weights."""
        at = f"{layer}.mlp.experts"
        if layer in self.forms.per_expert:
            return (f"{at}.{{e}}.gate_proj.weight", f"{at}.{{e}}.up_proj.weight"), (f"{at}.{{e}}.down_proj.weight",)
        return (f"{at}.gate_up_proj",), (f"{at}.down_proj",)

    def expert_scales(self, layer: str) -> dict[str, tuple[str, ...]]:
        """Sources of a layer's scales by the name of the `SparseMoE` port that takes them; none for plain weights."""
        suffixes = {FP8_BLOCK: ("_scale_inv",), NVFP4: ("_scale", "_scale_2")}.get(self.forms.expert_form(layer), ())
        return {
            port + suffix.removesuffix("_inv"): tuple(source + suffix for source in sources)
            for port, sources in zip(("gate_up", "down"), self.expert_sources(layer), strict=True)
            for suffix in suffixes
        }

    def scales_of_cache(self, layer: str) -> Scales:
        """Scales of the keys and values of a layer ("layers.3", "mtp.layers.0"); 1 where none are stored.

        Raises:
            CheckpointError: what is stored is not one scale for all of a layer's keys or values.
        """
        found = [(use, name) for name, use in scale_names(layer) if name in self.cache_scales]
        return chosen((use, self._cache_scale(self.cache_scales[name])) for use, name in found)

    def _cache_scale(self, info: TensorInfo) -> float:
        where = f"{shown(info.raw_name)} of {self.folder}"
        if math.prod(info.shape) != 1 or info.dtype not in FLOATS:
            raise CheckpointError(
                f"{where} is {list(info.shape)} {info.dtype}; an FP8 cache takes one floating-point scale for all keys "
                "of a layer and one for all its values. Choose --kv-cache-dtype auto."
            )
        value = float(self._array(info).astype(np.float32).reshape(()))
        if fault := scale_fault(value):
            raise CheckpointError(f"{where} is {value}: {fault}. Choose --kv-cache-dtype auto.")
        return value

    def ngram_spec(self, layer: int) -> NgramSpec:
        """How the host finds the n-gram rows of a layer of `config.ngram_layers`."""
        return self._ngrams[layer]

    def _module_forms(self) -> dict[str, str]:
        """How the files hold each module that may be quantized."""
        config, forms = self.config, self.forms
        layers = [f"layers.{i}" for i in range(config.num_hidden_layers)] + ([MTP_LAYER] if config.has_mtp else [])
        found = {f"{layer}.mlp.experts": forms.expert_form(layer) for layer in layers}
        tables = {f"layers.{i}.ple.ple_embedding.ngram_embedding": forms.table(i).form for i in config.ngram_layers}
        return found | tables

    def _read_ngrams(self) -> list[str]:
        faults: list[str] = []
        for layer in self.config.ngram_layers:
            self._ngrams[layer], found = ngram_spec(self.config, layer, self.tensors, self.forms, self._integers)
            faults += found
            faults += self._scale_faults(self._ngrams[layer].scale)
        return faults

    def _scale_faults(self, name: str) -> list[str]:
        """What is wrong with the one scale of a table (no name: it needs none)."""
        value = float(self.array(name).astype(np.float64).reshape(())) if name else 1.0
        return [] if 0 < value < np.inf else [f"{name} is {value}; a scale has to be a finite number above zero"]

    def _integers(self, name: str) -> tuple[int, ...]:
        return tuple(int(v) for v in self.array(name))


def _select(
    folder: Path, raw: Mapping[str, TensorInfo], config: ModelConfig, notes: Notes
) -> tuple[dict[str, TensorInfo], ModelConfig]:
    """Tensors of the text model by stripped name, and the configuration without an MTP layer that is not there."""
    vision = [n for n in raw if n.startswith(VISION_PREFIXES)]
    if vision:
        notes(f"Skipped {len(vision)} vision tensors (model.visual.*): only the text model is used.")
    activations = [n for n in raw if n.endswith(ACTIVATION_SCALES)]
    if activations:
        notes(f"Skipped {_scales(activations, 'activations')}: only weights are quantized.")
    caches = [n for n in raw if n.endswith(CACHE_SCALES)]
    if caches:
        notes(f"Found {_scales(caches, 'keys and values')}, which only an export with --kv-cache-dtype fp8 uses.")
    left_out = {*vision, *activations, *caches}
    tensors = _strip(folder, {n: t for n, t in raw.items() if n not in left_out})
    mtp = [n for n in tensors if n.startswith("mtp.")]
    if config.has_mtp and not mtp:
        notes("The checkpoint has no mtp.* tensors: no drafts by multi-token prediction.")
        config = config.with_overrides(mtp_num_hidden_layers=0)
    elif mtp and not config.has_mtp:
        notes(f"Skipped {len(mtp)} mtp.* tensors: config.json has mtp_num_hidden_layers = 0.")
        tensors = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        del tensors["lm_head.weight"]
        notes("Skipped lm_head.weight: config.json ties it to the embedding (tie_word_embeddings).")
    return tensors, config


def _scales(names: Sequence[str], what: str) -> str:
    """How many there are, with the first one's name."""
    return f"1 scale of {what} ({names[0]})" if len(names) == 1 else f"{len(names):,} scales of {what} ({names[0]}, …)"


def _forms(tensors: Mapping[str, TensorInfo]) -> Forms:
    return Forms.of({name: info.dtype for name, info in tensors.items()})


def _strip(folder: Path, raw: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for raw_name, info in raw.items():
        name = next((raw_name.removeprefix(p) for p in PREFIXES if raw_name.startswith(p)), raw_name)
        if name in tensors:
            raise CheckpointError(f"{folder} holds {name} twice: {tensors[name].raw_name} and {raw_name}.")
        tensors[name] = dataclasses.replace(info, name=name)
    return tensors


def _raise_faults(folder: Path, *kinds: list[str]) -> None:
    """One error with all faults; of each kind the first ones, so that a long list cannot hide another kind."""
    count = sum(map(len, kinds))
    if not count:
        return
    lines = []
    for faults in kinds:
        lines += [f"  - {f}" for f in faults[:MAX_LISTED_FAULTS]]
        if more := faults[MAX_LISTED_FAULTS:]:
            lines.append(f"  … and {len(more):,} more like the last one")
    faults_word = "1 fault" if count == 1 else f"{count:,} faults"
    raise CheckpointError(f"The checkpoint {folder} cannot be used ({faults_word}):\n" + "\n".join(lines))
