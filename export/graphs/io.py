"""Inputs and outputs of every graph of a bundle, by name: one place for names, dtypes and shapes.

The PyTorch graph modules, the ONNX export, the manifest and through it the runtime all take them from here.
State names are `<layer>.<port>` with the port's name in the op table; the output is `<layer>.<port>_out`.

Graphs: "head" (embedding and the layers before the first n-gram layer; absent when there is none before it), "body"
(the rest, logits), "mtp" (first draft step; returns block choices) and "mtp_draft" (further drafts; takes them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashnext.export.config import LINEAR_ATTENTION, SPARSE_ATTENTION, ModelConfig
from flashnext.export.errors import ConfigError
from flashnext.export.graphs.experts import ExpertFormat, expert_inputs
from flashnext.export.graphs.manifest import GraphSpec, Size, TensorSpec
from flashnext.export.kv_cache import CODES as CACHE_CODES
from flashnext.export.kv_cache import KvCache
from flashnext.export.ops.ports import CACHES, CODES
from flashnext.export.residual_scales import DRAFT, ResidualStorage

MTP_LAYER = DRAFT
MAX_WINDOW = 64
DEFAULT_CAPACITY = 4096


@dataclass(frozen=True)
class BuildOptions:
    """What is fixed when a bundle is made: pending window W, tokens per slot, slots, activation dtype, and how the
    residual branches, the recurrent states (float32, or bfloat16 for half the memory), keys and values are kept."""

    window: int = 8
    capacity: int = DEFAULT_CAPACITY
    slots: int = 4
    dtype: str = "float32"
    residual: ResidualStorage = field(default_factory=ResidualStorage)
    recurrent_dtype: str = "float32"
    kv_cache: KvCache = field(default_factory=KvCache)

    @property
    def residual_dtype(self) -> str:
        """dtype of the branches, in a graph and between graphs."""
        return CODES if self.residual.is_fp8 else self.dtype

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError unless the options fit the model."""
        limits = {
            "window": (self.window, 1, MAX_WINDOW),
            "capacity": (self.capacity, 1, config.max_position_embeddings),
            "slots": (self.slots, 1, 4096),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                hint = "; longer contexts need --rope-scaling" if name == "capacity" and value > high else ""
                raise ConfigError(f"--{name} {value} is outside {low} … {high} for this model{hint}.")
        for name, dtype in (("dtype", self.dtype), ("recurrent-dtype", self.recurrent_dtype)):
            if dtype not in ("float32", "bfloat16"):
                raise ConfigError(f"--{name} {dtype} is not one of float32, bfloat16.")
        if fault := next(self.residual.faults(config), ""):
            raise ConfigError(f"The residual cannot be stored: {fault}.")
        if fault := next(self.kv_cache.faults(config), ""):
            raise ConfigError(f"Keys and values cannot be kept: {fault}.")


def first_ngram_layer(config: ModelConfig) -> int:
    """Number of layers in the head graph: those before the first n-gram layer, 0 when there is no head."""
    return config.ngram_layers[0] if config.ngram_layers else 0


def graph_names(config: ModelConfig) -> tuple[str, ...]:
    """The graphs that a model of this configuration has."""
    head = ("head",) if first_ngram_layer(config) else ()
    return (*head, "body", *(("mtp", "mtp_draft") if config.has_mtp else ()))


def layers_of(config: ModelConfig, graph: str) -> range:
    """Backbone layers of a graph."""
    split = first_ngram_layer(config)
    return {"head": range(split), "body": range(split, config.num_hidden_layers)}.get(graph, range(0))


def graph_spec(
    config: ModelConfig, options: BuildOptions, graph: str, experts: Mapping[str, ExpertFormat] | None = None
) -> GraphSpec:
    """Inputs, outputs and states of one graph, in the order in which its module takes and returns them.

    `experts` gives the format of each layer's experts by the layer's prefix (they are bound as they are stored);
    without it they are plain weights of the activation dtype.
    """
    states = list(_states(config, options, graph))
    weights = _weight_inputs(config, options, graph, experts or {})
    inputs = [*_step_inputs(config, options, graph), *weights, *states]
    outs = [TensorSpec(f"{t.name}_out", t.dtype, t.shape, "state") for t in states]
    return GraphSpec(
        file=f"{graph}.onnx",
        inputs=tuple(inputs),
        outputs=(*_outputs(config, options, graph), *outs),
        states={t.name: f"{t.name}_out" for t in states},
    )


# --- what a step feeds and gets ---------------------------------------------------------------------------------------


def _step_inputs(config: ModelConfig, options: BuildOptions, graph: str) -> Iterator[TensorSpec]:
    linear = any(config.layer_types[i] == LINEAR_ATTENTION for i in layers_of(config, graph))
    if graph == "body" and first_ngram_layer(config):
        yield from _edges(config, options)
    else:
        yield TensorSpec("token_ids", "int32", ("B", "S"), "step")
    if graph.startswith("mtp"):
        yield _hidden(config, options, "hidden", "step")
        if options.residual.is_fp8:  # static ones too: the branches may be the body's or the draft layer's own
            yield _token_scale(config, "hidden", "step")
    for name in ("slots", "past_len", *(("accepted",) if linear else ()), "new_len"):
        yield TensorSpec(name, "int32", ("B",), "step")
    if graph == "mtp_draft":
        yield TensorSpec("blocks", "int32", ("B", config.budget_blocks), "step")
        yield TensorSpec("blocks_len", "int32", ("B",), "step")
    if graph != "head":
        yield TensorSpec("logit_rows", "int32", ("N",), "step")
    if graph == "body":
        for layer in config.ngram_layers:
            yield TensorSpec(f"ngram_rows.{layer}", options.dtype, ("B", "S", config.ple_embed_dim), "rows")


def _edges(config: ModelConfig, options: BuildOptions) -> Iterator[TensorSpec]:
    yield from _branches(config, options, "r", "edge")
    yield TensorSpec("y", options.dtype, ("B", "S", config.hidden_size), "edge")
    yield TensorSpec("s", "float32", ("B", "S", config.hc_count), "edge")


def _hidden(config: ModelConfig, options: BuildOptions, name: str, role: str) -> TensorSpec:
    return TensorSpec(name, options.residual_dtype, ("B", "S", config.hc_count, config.hidden_size), role)


def _token_scale(config: ModelConfig, name: str, role: str) -> TensorSpec:
    return TensorSpec(f"{name}_token_scale", "float32", ("B", "S", config.hc_count), role)


def _branches(config: ModelConfig, options: BuildOptions, name: str, role: str) -> Iterator[TensorSpec]:
    """Branches that are handed on, with their scales unless these are static."""
    yield _hidden(config, options, name, role)
    if options.residual.mode == "dynamic":
        yield _token_scale(config, name, role)


def _outputs(config: ModelConfig, options: BuildOptions, graph: str) -> Iterator[TensorSpec]:
    if graph == "head":
        yield from _edges(config, options)
        return
    yield TensorSpec("logits", "float32", ("N", config.vocab_size), "output")
    yield from _branches(config, options, "hidden" if graph == "body" else "hidden_out", "output")
    if graph == "mtp":
        yield TensorSpec("blocks", "int32", ("B", config.budget_blocks), "output")


# --- weights as inputs ------------------------------------------------------------------------------------------------


def expert_prefixes(config: ModelConfig, graph: str) -> Iterator[str]:
    """Prefixes of the layers of a graph, each of which has experts: `layers.0`, `mtp.layers.0`."""
    if graph.startswith("mtp"):
        yield MTP_LAYER
    yield from (f"layers.{i}" for i in layers_of(config, graph))


def _weight_inputs(
    config: ModelConfig, options: BuildOptions, graph: str, experts: Mapping[str, ExpertFormat]
) -> Iterator[TensorSpec]:
    """Inputs bound once from the checkpoint: embedding, LM head, experts."""
    dense = options.dtype
    table: tuple[Size, ...] = (config.vocab_size, config.hidden_size)
    if graph != "body" or not first_ngram_layer(config):
        yield TensorSpec("embed_tokens.weight", dense, table, "weight")
    if graph != "head":
        yield TensorSpec("lm_head.weight", dense, table, "weight")
    for prefix in expert_prefixes(config, graph):
        yield from expert_inputs(config, prefix, experts.get(prefix, ExpertFormat()), dense)


# --- states -----------------------------------------------------------------------------------------------------------


def _states(config: ModelConfig, options: BuildOptions, graph: str) -> Iterator[TensorSpec]:
    if graph.startswith("mtp"):
        yield from _attention_states(config, options, MTP_LAYER, index=graph == "mtp")
    for layer in layers_of(config, graph):
        prefix = f"layers.{layer}"
        if layer in config.ngram_layers:
            reach = (config.ple_conv_kernel_size - 1) * config.ngram_size
            yield _state(
                options, f"{prefix}.ple.conv_state", reach + options.window, config.hc_count * config.hidden_size
            )
        if config.layer_types[layer] == SPARSE_ATTENTION:
            yield from _attention_states(config, options, prefix, index=True)
        else:
            yield from _linear_states(config, options, prefix)


def _state(options: BuildOptions, name: str, *shape: int, dtype: str | None = None) -> TensorSpec:
    return TensorSpec(name, dtype or options.dtype, (options.slots + 1, *shape), "state")


def _linear_states(config: ModelConfig, options: BuildOptions, prefix: str) -> Iterator[TensorSpec]:
    c, heads = config, config.linear_num_value_heads
    yield _state(options, f"{prefix}.conv_state", c.linear_conv_kernel_dim - 1 + options.window, c.linear_conv_dim)
    head = (c.linear_key_head_dim, c.linear_value_head_dim)
    yield _state(options, f"{prefix}.recurrent_state", heads, *head, dtype=options.recurrent_dtype)
    width = c.linear_key_dim + c.linear_value_dim + 2 * heads
    yield _state(options, f"{prefix}.pending_state", options.window, width, dtype="float32")


def _attention_states(config: ModelConfig, options: BuildOptions, prefix: str, index: bool) -> Iterator[TensorSpec]:
    heads, dtype = (config.num_key_value_heads, config.head_dim), CACHE_CODES if options.kv_cache.is_fp8 else None
    for name in CACHES:
        yield _state(options, f"{prefix}.{name}", options.capacity + 1, *heads, dtype=dtype)
    if index:
        block, columns = config.indexer_compress_ratio, config.indexer_head_dim
        yield _state(options, f"{prefix}.index_tail_state", block - 1 + options.window, columns)
        yield _state(options, f"{prefix}.index_key_state", options.capacity // block + 1, columns)
