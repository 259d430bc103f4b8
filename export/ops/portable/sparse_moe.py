"""SparseMoE in plain operators, in two ways that give the same sum.

Few tokens (at most one choice per expert on average): the chosen experts' weights are gathered. Many tokens: a loop
over the experts applies each to all tokens and skips those that nobody chose, so that memory holds the weights of one
expert at a time. Weights stand on the left of every product, which spares transposing them, and are widened to
float32 (expert_weights.py) after they are picked.
"""

from __future__ import annotations

from flashnext.export.ops.portable import expert_weights
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, silu, zeros_like
from flashnext.export.ops.portable.context import Context


def build(c: Context) -> dict[str, Value]:
    tokens = c["x"].reshape(-1, c.sizes["H"]).cast(FLOAT)
    weights, experts = route(c)
    many = tokens.dim(0) * c.integer("top_k") > c.sizes["experts"]
    (total,) = c.by_steps(
        many, lambda: [looped(c, tokens, weights, experts)], lambda: [gathered(c, tokens, weights, experts)]
    )
    return {"y": total.op("Reshape", c["x"].op("Shape", dtype="int64")).cast(c.dtypes["T"])}


def route(c: Context) -> tuple[Value, Value]:
    """Weights and indices [tokens, top_k]; TopK gives ties to the lower index."""
    chance = c["router_logits"].reshape(-1, c.sizes["experts"]).cast(FLOAT).op("Softmax", axis=-1)
    count = c.body.sizes([c.integer("top_k")])
    weights, experts = c.body.node("TopK", [chance, count], [FLOAT, "int64"], axis=-1)
    return (weights / weights.reduce("Sum", -1, keep=True) if c.integer("normalize") else weights), experts


def gathered(c: Context, tokens: Value, weights: Value, experts: Value) -> Value:
    """Each token's own experts: weights [tokens, top_k, ...] by columns [tokens, 1, H, 1]."""
    inner, lead = c.sizes["I"], (0, 0)
    both = expert_weights.pick(c, "gate_up", experts, lead) @ tokens.unsqueeze(1, 3)
    out = expert_weights.pick(c, "down", experts, lead) @ (silu(both[:, :, :inner]) * both[:, :, inner:])
    return (out.squeeze(3) * weights.unsqueeze(2)).reduce("Sum", 1)


def looped(c: Context, tokens: Value, weights: Value, experts: Value) -> Value:
    inner, columns = c.sizes["I"], tokens.transpose(1, 0)

    def expert(index: Value, total: Value) -> tuple[list[Value], list[Value]]:
        chosen = experts.equal(index)

        def add() -> list[Value]:
            share = chosen.where(weights, 0.0).reduce("Sum", 1)
            both = expert_weights.pick(c, "gate_up", index, ()) @ columns
            out = expert_weights.pick(c, "down", index, ()) @ (silu(both[:inner]) * both[inner:])
            return [total + out * share]

        anyone = chosen.cast("int32").op("ReduceMax", keepdims=0) > 0
        return c.body.if_(anyone, add, lambda: [total]), []

    (total,) = c.body.loop(c.body.sizes([c.sizes["experts"]]), [zeros_like(columns)], expert)
    return total.transpose(1, 0)
