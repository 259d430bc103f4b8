"""Tensors that quantized experts and n-gram tables have to consist of: the part of `layout` for codes and scales.

    experts.{e}.gate_proj.weight  F8_E4M3 [I, H]     experts.{e}.gate_proj.weight          U8 [I, H/2]
    ….weight_scale_inv  [ceil(I/128), ceil(H/128)]   ….weight_scale  F8_E4M3 [I, H/16];  ….weight_scale_2  F32

Scales of activations (`input_scale`) are not part of it: the reader leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashnext.export.checkpoint.forms import FP8, FP8_BLOCK, NVFP4, PLAIN, Table
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CheckpointError
from flashnext.export.number_formats import BLOCK, GROUP

FLOATS = ("BF16", "F16", "F32")

Shape = tuple[int | None, ...]
Tensors = Iterator[tuple[str, "Expected"]]


@dataclass(frozen=True)
class Expected:
    """What a tensor has to be. A None in `shape` is a size that is checked elsewhere (rows of an n-gram shard).

    `shape` () is a single value, which may also be stored as [1].
    """

    shape: Shape
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


def experts(c: ModelConfig, at: str, form: str, per_expert: bool) -> Tensors:
    """The routed experts of one MoE block.

    Raises:
        CheckpointError: sizes that the form cannot hold.
    """
    width, hidden, count = c.moe_intermediate_size, c.hidden_size, c.num_experts
    _check_sizes(form, width, hidden, per_expert)
    if not per_expert:
        gate_up, down = f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
        if form == PLAIN:
            yield gate_up, Expected((count, 2 * width, hidden))
            yield down, Expected((count, hidden, width))
        else:
            yield from _block_fp8(gate_up, f"{gate_up}_scale_inv", (count,), 2 * width, hidden)
            yield from _block_fp8(down, f"{down}_scale_inv", (count,), hidden, width)
        return
    # A layer's experts share these objects: an official checkpoint has 300,000 entries.
    inward, outward = list(_matrix(form, width, hidden)), list(_matrix(form, hidden, width))
    for e in range(count):
        for name, tensors in (("gate_proj", inward), ("up_proj", inward), ("down_proj", outward)):
            for suffix, expected in tensors:
                yield f"{at}.experts.{e}.{name}.{suffix}", expected


def table(c: ModelConfig, tensors: Table) -> Tensors:
    """The n-gram table of one layer.

    Raises:
        CheckpointError: columns that the form cannot hold.
    """
    columns = c.ple_embed_dim // c.ngram_heads
    if tensors.form == NVFP4 and columns % GROUP:
        raise CheckpointError(f"The n-gram table is NVFP4, which needs rows of a multiple of {GROUP}, not {columns}.")
    shape, dtypes = {
        PLAIN: ((None, columns), FLOATS),
        FP8: ((None, columns), ("F8_E4M3",)),
        NVFP4: ((None, columns // 2), ("U8",)),
    }[tensors.form]
    for name in tensors.shards:
        yield name, Expected(shape, dtypes)
    for name in tensors.row_scales:
        yield name, Expected((None, columns // GROUP), ("F8_E4M3",))
    if tensors.scale:
        yield tensors.scale, Expected((), FLOATS)


def _matrix(form: str, rows: int, columns: int) -> Tensors:
    """One expert's matrix by the ends of its tensors' names."""
    if form == PLAIN:
        yield "weight", Expected((rows, columns))
        return
    if form == FP8_BLOCK:
        yield from _block_fp8("weight", "weight_scale_inv", (), rows, columns)
    else:
        yield "weight", Expected((rows, columns // 2), ("U8",))
        yield "weight_scale", Expected((rows, columns // GROUP), ("F8_E4M3",))
        yield "weight_scale_2", Expected((), ("F32",))


def _block_fp8(codes: str, scale: str, lead: tuple[int, ...], rows: int, columns: int) -> Tensors:
    yield codes, Expected((*lead, rows, columns), ("F8_E4M3",))
    yield scale, Expected((*lead, -(-rows // BLOCK), -(-columns // BLOCK)))


def _check_sizes(form: str, width: int, hidden: int, per_expert: bool) -> None:
    if form == NVFP4 and (width % GROUP or hidden % GROUP or not per_expert):
        raise CheckpointError(
            f"NVFP4 experts need a tensor for each expert, and sizes that are multiples of {GROUP}: the model has "
            f"hidden_size = {hidden}, moe_intermediate_size = {width}"
            f"{'' if per_expert else ', and fused experts'}. Convert the checkpoint again."
        )
    if form == FP8_BLOCK and not per_expert and width % BLOCK:
        raise CheckpointError(
            f"Fused FP8 experts need a moe_intermediate_size that is a multiple of {BLOCK}, not {width}: their blocks "
            "would lie across gate and up. Convert the checkpoint to a tensor for each expert."
        )
