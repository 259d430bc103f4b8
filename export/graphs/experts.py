"""Expert weights as graph inputs: names, dtypes and shapes for each form of `SparseMoE`, and where they come from.

Codes keep the checkpoint's bytes and are bound as uint8. Block scales, stored as BF16 or F32, are bound as float32:
that is one number for 16,384 codes, and kernels need one variant less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.manifest import TensorSpec
from flashnext.export.ops import schema

DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names that graphs use for the dtypes of unquantized tensors."""
_WEIGHTS = {"gate_up_weight": "gate_up_proj", "down_weight": "down_proj"}
_DTYPES = {"C": "uint8"}
_FIRST_PORT = 2
"""Ports of SparseMoE before the experts' own: x and router_logits."""


@dataclass(frozen=True)
class ExpertFormat:
    """How a layer's experts are stored: a form of `SparseMoE`, and the dtype of plain ones ("": the activations')."""

    form: str = "plain"
    dtype: str = ""


def expert_format(checkpoint: Checkpoint, prefix: str) -> ExpertFormat:
    """Format of the experts of a layer ("layers.3", "mtp.layers.0")."""
    form = checkpoint.forms.expert_form(prefix)
    if form != "plain":
        return ExpertFormat(form)
    gate_up, _ = checkpoint.expert_sources(prefix)
    return ExpertFormat(form, DTYPE_NAMES[checkpoint.tensors[gate_up[0].replace("{e}", "0")].dtype])


def input_names(form: str, prefix: str) -> list[str]:
    """Names of a layer's expert inputs in the order of the op's ports."""
    ports = schema.SPARSE_MOE.form(form).inputs[_FIRST_PORT:]
    return [f"{prefix}.mlp.experts.{_WEIGHTS.get(p.name, p.name)}" for p in ports]


def form_of(names: Mapping[str, object], prefix: str) -> str:
    """The form whose inputs are among `names`; forms with more scales are looked for first."""
    forms = sorted(schema.SPARSE_MOE.forms, key=lambda f: -len(f.inputs))
    return next(f.name for f in forms if all(n in names for n in input_names(f.name, prefix)))


def expert_inputs(config: ModelConfig, prefix: str, found: ExpertFormat, dense: str) -> Iterator[TensorSpec]:
    """A layer's expert inputs; `dense` is the dtype of activations."""
    sizes = {"experts": config.num_experts, "I": config.moe_intermediate_size, "H": config.hidden_size}
    dtypes = {**_DTYPES, "E": found.dtype or dense}
    ports = schema.SPARSE_MOE.form(found.form).inputs[_FIRST_PORT:]
    for name, port in zip(input_names(found.form, prefix), ports, strict=True):
        shape = tuple(int(str(schema.evaluate(d, sizes))) for d in port.shape)
        yield TensorSpec(name, dtypes.get(port.dtype, port.dtype), shape, "weight")


def expert_sources(checkpoint: Checkpoint, prefix: str) -> dict[str, tuple[str, ...]]:
    """`WeightSpec.sources` of each of a layer's expert inputs."""
    at = f"{prefix}.mlp.experts"
    gate_up, down = checkpoint.expert_sources(prefix)
    scales = {f"{at}.{port}": sources for port, sources in checkpoint.expert_scales(prefix).items()}
    return {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down, **scales}


def is_scale(name: str) -> bool:
    """Whether an expert input holds scales, which must be finite and above zero."""
    return ".mlp.experts." in name and name.rsplit(".", 1)[1] not in _WEIGHTS.values()
