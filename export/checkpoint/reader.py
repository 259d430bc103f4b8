"""Open a checkpoint folder: configuration, headers of all shards, every tensor checked; weights stay on disk.

    checkpoint = Checkpoint.open(folder, notes=print)
    checkpoint.config, checkpoint.tensors["embed_tokens.weight"], checkpoint.array("layers.0.linear_attn.A_log")

Opening reads headers only (and the few integers of the n-gram hash). All faults of the tensors are reported together,
because a user who converts a checkpoint wants the whole list, not the first entry of it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashnext.export.checkpoint.layout import Forms, expected_tensors, layout_faults
from flashnext.export.checkpoint.ngram_table import ngram_spec
from flashnext.export.checkpoint.safetensors_file import TensorInfo, map_file, tensor_view
from flashnext.export.checkpoint.shards import read_tensors
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec

PREFIXES = ("model.language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
MAX_LISTED_FAULTS = 20
"""Lines of an error for each kind of fault."""

Notes = Callable[[str], None]


class Checkpoint:
    """A checkpoint whose files are sound and whose tensors form the model of its configuration.

    `tensors` maps prefix-stripped names to where they lie; `common_parent` is the real folder above all weight files.
    """

    def __init__(self, folder: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.common_parent = Path(os.path.commonpath({str(t.file.parent) for t in tensors.values()}))
        self.forms = Forms.of(tensors)
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
        config = ModelConfig.from_folder(path)
        raw, faults = read_tensors(path)
        _raise_faults(path, faults)
        tensors, config = _select(path, raw, config, notes or (lambda line: None))
        _raise_faults(path, *layout_faults(expected_tensors(config, Forms.of(tensors)), tensors))
        checkpoint = cls(path, config, tensors)
        _raise_faults(path, checkpoint._read_ngrams())
        return checkpoint

    @property
    def expert_layout(self) -> Literal["fused", "per_expert"]:
        """How the main model's routed experts are stored (each layer's own layout is in `expert_sources`)."""
        return "per_expert" if "layers.0" in self.forms.per_expert else "fused"

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as a read-only mapped array of its own dtype (bfloat16 and float8 from ml_dtypes)."""
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = map_file(info.file)
        return tensor_view(self._maps[info.file], info)

    def expert_sources(self, layer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`WeightSpec.sources` of a layer's ("layers.3", "mtp.layers.0") gate_up and down expert weights."""
        at = f"{layer}.mlp.experts"
        if layer in self.forms.per_expert:
            return (f"{at}.{{e}}.gate_proj.weight", f"{at}.{{e}}.up_proj.weight"), (f"{at}.{{e}}.down_proj.weight",)
        return (f"{at}.gate_up_proj",), (f"{at}.down_proj",)

    def ngram_spec(self, layer: int) -> NgramSpec:
        """How the host finds the n-gram rows of a layer of `config.ngram_layers`."""
        return self._ngrams[layer]

    def _read_ngrams(self) -> list[str]:
        faults: list[str] = []
        for layer in self.config.ngram_layers:
            self._ngrams[layer], found = ngram_spec(self.config, layer, self.tensors, self.forms, self._integers)
            faults += found
        return faults

    def _integers(self, name: str) -> tuple[int, ...]:
        return tuple(int(v) for v in self.array(name))


def _select(
    folder: Path, raw: Mapping[str, TensorInfo], config: ModelConfig, notes: Notes
) -> tuple[dict[str, TensorInfo], ModelConfig]:
    """Tensors of the text model by stripped name, and the configuration without an MTP layer that is not there."""
    vision = [n for n in raw if n.startswith(VISION_PREFIXES)]
    if vision:
        notes(f"Skipped {len(vision)} vision tensors (model.visual.*): only the text model is used.")
    tensors = _strip(folder, {n: t for n, t in raw.items() if not n.startswith(VISION_PREFIXES)})
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
