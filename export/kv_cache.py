"""How the keys and values of sparse attention are kept: in the activations' dtype, or in E4M3 with a layer's scales.

What vLLM calls `kv_cache_dtype="fp8"`: a key or value is a code times its layer's `k_scale` or `v_scale`. Checkpoints
may hold these scales, under the names that vLLM reads; a layer without them has scales of 1, and one that has only one
of the two uses it for both, as vLLM does. Plain data (no torch).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flashnext.export.config import SPARSE_ATTENTION, ModelConfig
from flashnext.export.files import plain
from flashnext.export.residual_scales import DRAFT, scale_fault

KV_CACHE_DTYPES = ("auto", "fp8")
"""What a user may ask for: "auto" is the activations' dtype."""
CODES = "uint8"
"""dtype of a cache of codes in a graph: ONNX scatters no 8-bit floats."""
ENDS = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv"}
"""Last part of a scale's name, and what it is for."""
PLACES = ("", "attn.", "k_proj.", "v_proj.", "qkv_proj.")
"""Between `self_attn.` and the last part."""
UNSCALED = (1.0, 1.0)

Scales = tuple[float, float]
"""Of keys and of values."""


@dataclass(frozen=True)
class KvCache:
    """`dtype` is one of KV_CACHE_DTYPES; "fp8" has scales for every layer of `attention_layers`."""

    dtype: str = "auto"
    scales: Mapping[str, Scales] = field(default_factory=dict)

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "fp8"

    @classmethod
    def unscaled(cls, config: ModelConfig) -> KvCache:
        """FP8 with scales of 1: what there is to know about a cache's size."""
        return cls("fp8", dict.fromkeys(attention_layers(config), UNSCALED))

    def faults(self, config: ModelConfig) -> Iterator[str]:
        """What keeps a model's keys and values from being kept this way."""
        if self.dtype not in KV_CACHE_DTYPES:
            yield f"--kv-cache-dtype {self.dtype:.40} is not one of {', '.join(KV_CACHE_DTYPES)}"
            return
        layers = list(attention_layers(config)) if self.is_fp8 else []
        if set(self.scales) != set(layers):
            yield f"there are scales for {plain(', '.join(self.scales), 80)!r}, expected some for {layers!s:.80}"
        for layer, values in self.scales.items():
            for fault in filter(None, map(scale_fault, values)):
                yield f"the scales {values} of {plain(layer, 40)}'s keys and values: {fault}"


def attention_layers(config: ModelConfig) -> Iterator[str]:
    """Layers with keys and values, the draft layer included: `layers.3`, …, `mtp.layers.0`."""
    yield from (f"layers.{i}" for i, kind in enumerate(config.layer_types) if kind == SPARSE_ATTENTION)
    if config.has_mtp:
        yield DRAFT


def scale_names(layer: str) -> Iterator[tuple[str, str]]:
    """Names (prefix stripped) that a layer's scales may have, each with what it is for: "k", "v" or "kv"."""
    return ((f"{layer}.self_attn.{place}{end}", use) for end, use in ENDS.items() for place in PLACES)


def chosen(found: Iterable[tuple[str, float]]) -> Scales:
    """The scales of a layer from what is stored for it, by use."""
    stored = dict(found)
    both = stored.get("kv")
    keys, values = (stored.get(use, both) for use in "kv")
    keys, values = (values if keys is None else keys), (keys if values is None else values)
    return UNSCALED if keys is None or values is None else (keys, values)
