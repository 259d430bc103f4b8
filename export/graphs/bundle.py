"""`flashnext export`: a checkpoint becomes a bundle of ONNX graphs and a manifest, without loading any weight.

The bundle is made in a hidden folder beside its target and renamed at the end, so it appears whole or not at all.

    export_bundle("Qwen3.8-Flash-Next", "bundle", ExportOptions(window=8, capacity=32768))
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from flashnext.export.checkpoint.generation import generation_settings
from flashnext.export.checkpoint.identity import identity
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.errors import BundleError, ConfigError, ScalesError
from flashnext.export.graphs import external, functions
from flashnext.export.graphs.beside import write_beside
from flashnext.export.graphs.experts import DTYPE_NAMES, expert_format, expert_sources, is_scale
from flashnext.export.graphs.io import DEFAULT_CAPACITY, BuildOptions, expert_prefixes, graph_names, graph_spec
from flashnext.export.graphs.manifest import CheckpointRef, GraphSpec, Manifest, WeightSpec
from flashnext.export.graphs.trace import trace
from flashnext.export.graphs.whole_folder import whole_or_nothing
from flashnext.export.kv_cache import UNSCALED, KvCache, attention_layers
from flashnext.export.model.loading import build_on_meta
from flashnext.export.ops import schema
from flashnext.export.residual_scales import RESIDUAL_FORMS, ResidualStorage, read_scales
from flashnext.export.rope_config import parse_rope

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class ExportOptions(BuildOptions):
    """Options of `flashnext export`.

    `residual_form` is "plain", "fp8" or "fp8-dynamic"; "fp8" takes its static scales from the file `scales`.
    `kv_cache_dtype` is "auto" or "fp8", whose scales are the checkpoint's own, or 1.
    `indexer_budget` (tokens a query may choose) and `rope_scaling` (`rope_parameters` of the checkpoint's form, for
    example YaRN) override the checkpoint's configuration. A `capacity` of 0 stands for 4,096 tokens, or the model's
    context where that is shorter. `beside` also writes the graphs next to the shards, where command line tools find
    the external data. `overwrite` replaces an existing bundle.
    """

    capacity: int = 0
    residual_form: str = "plain"
    scales: str | Path | None = None
    kv_cache_dtype: str = "auto"
    indexer_budget: int | None = None
    rope_scaling: dict[str, Any] | None = None
    beside: bool = False
    overwrite: bool = False


def export_bundle(
    checkpoint_folder: str | Path,
    bundle_folder: str | Path,
    options: ExportOptions | None = None,
    *,
    note: Callable[[str], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export a checkpoint to a bundle; returns the manifest.

    `note` gets remarks for the user, `progress` the name of each graph when it is begun.

    Raises:
        ConfigError, CheckpointError: the checkpoint or an option does not fit.
        BundleError: the target exists (without `overwrite`) or cannot be written.
    """
    options = options or ExportOptions()
    target = Path(bundle_folder)
    _check_target(target, options.overwrite)
    checkpoint = Checkpoint.open(checkpoint_folder, note)
    config = overridden(checkpoint.config, options)
    options = fitted(with_kv_cache(with_residual(options, checkpoint), checkpoint, note), config)
    with whole_or_nothing(target) as folder:
        manifest = _write_bundle(checkpoint, config, options, folder, progress)
    if options.beside:
        note(f"The graphs lie beside the weights too: {write_beside(target, manifest)[0]}, …")
    return manifest


def _reference(checkpoint: Checkpoint) -> CheckpointRef:
    folder, parent = checkpoint.folder, checkpoint.common_parent
    files = sorted({info.file.relative_to(parent).as_posix() for info in checkpoint.tensors.values()})
    return CheckpointRef(str(folder.resolve()), identity(folder), str(parent), tuple(files))


def with_residual(options: ExportOptions, checkpoint: Checkpoint) -> ExportOptions:
    """The options with the storage of the residual that they ask for.

    Raises:
        ConfigError: options that contradict one another.
        ScalesError: a file of scales that cannot be used with this checkpoint.
    """
    form, path = options.residual_form, options.scales
    if form not in RESIDUAL_FORMS:
        raise ConfigError(f"--residual {form} is not one of {', '.join(RESIDUAL_FORMS)}.")
    if path is not None and form != "fp8":
        raise ConfigError(f"--scales is about a residual in FP8 with static scales, not --residual {form}. "
                          "Leave it out, or choose --residual fp8.")  # fmt: skip
    if form == "plain":
        return options
    if form == "fp8-dynamic":
        return dataclasses.replace(options, residual=ResidualStorage("dynamic"))
    if path is None:
        raise ConfigError("--residual fp8 needs scales. Find them with: flashnext calibrate CKPT --text … --out "
                          "scales.json, and give --scales scales.json; or choose --residual fp8-dynamic.")  # fmt: skip
    scales = read_scales(path, checkpoint.config, identity(checkpoint.folder))
    if scales.format != "e4m3":
        raise ScalesError(
            f"{path} has scales for {scales.format}, but graphs and kernels store e4m3. "
            "Calibrate again, without --format."
        )
    return dataclasses.replace(options, residual=ResidualStorage(scales.mode, scales.scales))


def with_kv_cache(
    options: ExportOptions, checkpoint: Checkpoint, note: Callable[[str], None] = lambda _: None
) -> ExportOptions:
    """The options with the keys' and values' scales, if they ask for FP8; `note` hears of scales that are not there.

    Raises:
        CheckpointError: scales of the checkpoint that cannot be used.
    """
    if options.kv_cache_dtype != "fp8":
        return dataclasses.replace(options, kv_cache=KvCache(options.kv_cache_dtype))
    scales = {layer: checkpoint.scales_of_cache(layer) for layer in attention_layers(checkpoint.config)}
    if all(pair == UNSCALED for pair in scales.values()):
        note("Keys and values are stored in FP8 with scales of 1: the checkpoint has no others.")
    return dataclasses.replace(options, kv_cache=KvCache("fp8", scales))


def fitted(options: ExportOptions, config: ModelConfig) -> ExportOptions:
    """The options with a definite capacity, checked against the model."""
    if not options.capacity:
        options = dataclasses.replace(options, capacity=min(DEFAULT_CAPACITY, config.max_position_embeddings))
    options.check(config)
    return options


def overridden(config: ModelConfig, options: ExportOptions) -> ModelConfig:
    """The checkpoint's configuration with the options' overrides, checked again."""
    changes: dict[str, Any] = {}
    if options.indexer_budget is not None:
        changes["indexer_budget"] = options.indexer_budget
    if options.rope_scaling is not None:
        base = dataclasses.asdict(config.rope) | {"original_max_position_embeddings": None}
        raw = {k: v for k, v in (base | options.rope_scaling).items() if v is not None}
        rope, faults = parse_rope(raw, config.rope.original_max_position_embeddings or config.max_position_embeddings)
        if faults:
            raise ConfigError("--rope-scaling cannot be used: " + "; ".join(faults))
        changes["rope"] = rope
        if rope.original_max_position_embeddings is not None:
            changes["max_position_embeddings"] = int(rope.original_max_position_embeddings * rope.factor)
    return config.with_overrides(**changes) if changes else config


def _write_bundle(
    checkpoint: Checkpoint, config: ModelConfig, options: ExportOptions, folder: Path, progress: Callable[[str], None]
) -> Manifest:
    manifest = describe(checkpoint, config, options)
    graphs: dict[str, GraphSpec] = {}
    for name, spec in manifest.graphs.items():
        progress(name)
        model, _ = build_onnx(checkpoint, config, options, name, spec)
        ir.save(model, folder / spec.file)
        graphs[name] = dataclasses.replace(spec, sha256=hashlib.sha256((folder / spec.file).read_bytes()).hexdigest())
    manifest = dataclasses.replace(manifest, graphs=graphs)
    for file in manifest.tokenizer_files:
        shutil.copyfile(checkpoint.folder / file, folder / file)
    manifest.write(folder)
    return manifest


def describe(checkpoint: Checkpoint, config: ModelConfig, options: BuildOptions) -> Manifest:
    """The manifest of a bundle of this checkpoint; the graphs themselves are not needed for it."""
    graphs = {name: spec_for(checkpoint, config, options, name) for name in graph_names(config)}
    stops, sampling = generation_settings(checkpoint.folder, checkpoint.config)
    folder = checkpoint.folder
    return Manifest(
        config=config,
        dtype=options.dtype,
        window=options.window,
        capacity=options.capacity,
        slots=options.slots,
        residual_dtype=options.residual_dtype,
        residual_mode=options.residual.mode,
        recurrent_dtype=options.recurrent_dtype,
        kv_cache_dtype=options.kv_cache.dtype,
        kv_cache_scales=options.kv_cache.scales,
        residual_scales=options.residual.scales,
        checkpoint=_reference(checkpoint),
        graphs=graphs,
        weights=tuple(_weight_specs(checkpoint, config, graphs)),
        ngrams=tuple(checkpoint.ngram_spec(layer) for layer in config.ngram_layers),
        ops={op.name: schema.VERSION for op in schema.OPS},
        tokenizer_files=tuple(f for f in TOKENIZER_FILES if (folder / f).is_file()),
        stop_token_ids=stops,
        sampling_defaults=sampling,
        producer=f"flashnext-trt {importlib.metadata.version('flashnext-trt')}",
    )


def build_onnx(
    checkpoint: Checkpoint, config: ModelConfig, options: BuildOptions, name: str, spec: GraphSpec
) -> tuple[ir.Model, Counter[str]]:
    """One graph as an ONNX model with external weights and portable functions, and its custom nodes by op and form."""
    graph = build_on_meta(config, options, name)
    dtypes = {key: getattr(torch, DTYPE_NAMES[checkpoint.tensors[key].dtype]) for key in graph.state_dict()}
    constants = {name: ir.tensor(buffer.numpy(), name=name) for name, buffer in graph.named_buffers()}
    model = trace(graph, spec, dtypes)
    counts = functions.attach(model, options.window)
    external.point_to_checkpoint(model, checkpoint, constants)
    model.producer_name, model.producer_version = "flashnext-trt", importlib.metadata.version("flashnext-trt")
    return model, counts


def spec_for(checkpoint: Checkpoint, config: ModelConfig, options: BuildOptions, graph: str) -> GraphSpec:
    """Specification of one graph for the experts that the checkpoint has."""
    formats = {prefix: expert_format(checkpoint, prefix) for prefix in expert_prefixes(config, graph)}
    return graph_spec(config, options, graph, formats)


def _weight_specs(checkpoint: Checkpoint, config: ModelConfig, graphs: dict[str, GraphSpec]) -> Iterator[WeightSpec]:
    """Where each weight input of any graph comes from; the same input of several graphs is one weight."""
    seen: set[str] = set()
    for name, spec in graphs.items():
        sources = _dense_sources(config)
        for prefix in expert_prefixes(config, name):
            sources |= expert_sources(checkpoint, prefix)
        for tensor in spec.inputs:
            if tensor.role == "weight" and tensor.name not in seen:
                seen.add(tensor.name)
                shape = tuple(int(d) for d in tensor.shape)
                yield WeightSpec(tensor.name, tensor.dtype, shape, sources[tensor.name], is_scale(tensor.name))


def _dense_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    lm_head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {"embed_tokens.weight": ("embed_tokens.weight",), "lm_head.weight": (lm_head,)}


# --- files: whole or not at all ---------------------------------------------------------------------------------------


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise BundleError(f"{target} is a file; name a folder for the bundle.")
    if target.is_dir() and any(target.iterdir()):
        if not (target / "manifest.json").is_file():
            raise BundleError(f"{target} holds files that are not a bundle; name another folder.")
        if not overwrite:
            raise BundleError(
                f"{target} holds a bundle already; add --overwrite to replace it, or name another folder."
            )
    if not target.absolute().parent.is_dir():
        raise BundleError(f"{target.absolute().parent} is not a folder; make it first, or name another folder.")
