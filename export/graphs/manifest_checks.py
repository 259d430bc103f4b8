"""Whether a manifest contradicts itself or its folder; a manifest is data from strangers.

What a graph takes and gives follows from the model's configuration and the bundle's sizes, so it is compared with
what this release would write. Weights and n-gram tables follow from the checkpoint too: here they have to fit the
graphs and the configuration, and the runtime checks them against the checkpoint before it takes memory for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flashnext.export.errors import BundleError, ConfigError
from flashnext.export.files import is_finite, plain
from flashnext.export.graphs.io import BuildOptions, graph_names, graph_spec
from flashnext.export.graphs.manifest import GraphSpec, Manifest, NgramSpec, TensorSpec, WeightSpec
from flashnext.export.kv_cache import KvCache
from flashnext.export.ops import schema
from flashnext.export.residual_scales import ResidualStorage

WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "uint8")


def check_manifest(manifest: Manifest, path: Path) -> None:
    """Check what `path` says.

    Raises:
        BundleError: the first fault.
    """
    fault = next(_faults(manifest, path.parent), None)
    if fault:
        raise BundleError(f"{path} cannot be used: {fault}. Export the bundle again.")


def _faults(manifest: Manifest, folder: Path) -> Iterator[str]:
    yield from _file_faults(manifest, folder)
    yield from _size_faults(manifest)
    if dict(manifest.ops) != {op.name: schema.VERSION for op in schema.OPS}:
        yield f"its custom ops {dict(manifest.ops)!s:.200} are not those of this release (version {schema.VERSION})"
    yield from _graph_faults(manifest)
    yield from _weight_faults(manifest)
    if sorted(n.layer for n in manifest.ngrams) != sorted(manifest.config.ngram_layers):
        yield f"its n-gram tables are not those of the layers {list(manifest.config.ngram_layers)}"
    for ngram in manifest.ngrams:
        yield from _ngram_faults(manifest, ngram)
    if any(token >= manifest.config.vocab_size for token in manifest.stop_token_ids):
        yield f"stop_token_ids {list(manifest.stop_token_ids)!s:.80} exceed the vocabulary"
    for name, value in manifest.sampling_defaults.items():
        if not isinstance(value, (bool, int, float)) or not is_finite(value):
            yield f"sampling_defaults has {name!r:.40} = {value!r:.40}, expected a number"


def _file_faults(manifest: Manifest, folder: Path) -> Iterator[str]:
    """Every file that is named is a plain name and lies in the bundle's folder itself."""
    for name in (*(g.file for g in manifest.graphs.values()), *manifest.tokenizer_files):
        if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
            yield f"it names the file {name!r:.200}, but a bundle's files lie in its own folder"
        elif not os.path.isfile(folder / name):  # (a path's own is_file raises for a name that is too long)
            yield f"{folder} lacks {plain(name)}"
        elif (folder / name).resolve().parent != folder.resolve():
            yield f"{name} is a link that leaves the bundle's folder"


def _size_faults(manifest: Manifest) -> Iterator[str]:
    try:
        options_of(manifest).check(manifest.config)
    except ConfigError as fault:
        yield str(fault).rstrip(".")
    if manifest.residual_dtype != options_of(manifest).residual_dtype:
        mode, dtype = manifest.residual_mode, manifest.dtype
        yield f"residual_dtype is {manifest.residual_dtype!r:.40}, but the mode is {mode!r:.40} and dtype {dtype!r:.40}"


def options_of(manifest: Manifest) -> BuildOptions:
    """The sizes that a bundle was made with."""
    storage = ResidualStorage(manifest.residual_mode, manifest.residual_scales)
    sizes = (manifest.window, manifest.capacity, manifest.slots)
    cache = KvCache(manifest.kv_cache_dtype, manifest.kv_cache_scales)
    return BuildOptions(*sizes, manifest.dtype, storage, manifest.recurrent_dtype, cache)


def _graph_faults(manifest: Manifest) -> Iterator[str]:
    names = graph_names(manifest.config)
    if sorted(manifest.graphs) != sorted(names):
        yield f"its graphs are {sorted(manifest.graphs)!s:.80}, expected {', '.join(names)}"
        return
    for name in names:
        found, expected = manifest.graphs[name], graph_spec(manifest.config, options_of(manifest), name)
        for what in ("inputs", "outputs"):
            if _not_weights(getattr(found, what)) != _not_weights(getattr(expected, what)):
                yield f"the {what} of the graph {name} are not those of its model configuration"
        if found.states != expected.states:
            yield f"the states of the graph {name} are not those of its model configuration"


def _not_weights(tensors: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    return [t for t in tensors if t.role != "weight"]


def _weight_faults(manifest: Manifest) -> Iterator[str]:
    weights = {w.name: w for w in manifest.weights}
    for weight in manifest.weights:
        if weight.dtype not in WEIGHT_DTYPES:
            yield f"the weight {weight.name!r:.80} has the unknown dtype {weight.dtype!r:.40}"
    for name, graph in manifest.graphs.items():
        yield from _unfed_inputs(name, graph, weights)


def _unfed_inputs(name: str, graph: GraphSpec, weights: dict[str, WeightSpec]) -> Iterator[str]:
    for tensor in graph.inputs:
        weight = weights.get(tensor.name)
        if tensor.role == "weight" and (weight is None or (weight.dtype, weight.shape) != (tensor.dtype, tensor.shape)):
            yield f"no weight of the same dtype and shape feeds the input {tensor.name!r:.80} of the graph {name}"


def _ngram_faults(manifest: Manifest, n: NgramSpec) -> Iterator[str]:
    c, heads = manifest.config, len(n.head_sizes)
    checks = (
        (n.layer in c.ngram_layers and n.input == f"ngram_rows.{n.layer}", "layer and input"),
        (len(n.multipliers) == c.ngram_size, "multipliers"),
        (n.heads_per_ngram == c.heads_per_ngram and heads == c.ngram_heads, "heads"),
        (n.columns * heads == c.ple_embed_dim, "columns"),
        (n.eos == c.ngram_eos, "eos"),
        (bool(n.scale) == (n.form != "plain"), "form and scale"),
        (len(n.row_scales) == (len(n.shards) if n.form == "nvfp4" else 0), "row scales"),
        (len(n.head_offsets) == heads and all(s > 0 for s in n.head_sizes), "head sizes"),
        (max(map(sum, zip(n.head_sizes, n.head_offsets, strict=False)), default=0) <= n.rows < 1 << 40, "rows"),
    )
    yield from (f"{what} of the n-gram table of layer {n.layer} do not fit the model" for ok, what in checks if not ok)
