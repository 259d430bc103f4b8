"""GatedDeltaNet in plain operators: convolution, commit of the accepted pending tokens, chunked delta rule, gated norm.

S decides between two ways, as in the table: up to W tokens stay pending, so one chunk of 2W rows holds the pending
tokens and the new ones, and the state that is written back is the one after the accepted pending rows. More tokens
are committed at once, in a loop over chunks of 64. The old state is gathered once, before it is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from flashnext.export.ops.portable import common, delta_rule
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, Ring, Rows
from flashnext.export.ops.portable.context import Context

CHUNK = 64
"""Tokens of a prefill chunk: the usual size; the inverse costs T^3, the loop over chunks 1/T."""
L2_EPS = 1e-6


@dataclass(frozen=True)
class Tokens:
    """Tokens' contribution to the state: k [B, T, K*Dk], v [B, T, V*Dv], g and beta [B, T, V]; float32."""

    k: Value
    v: Value
    g: Value
    beta: Value

    def parts(self) -> tuple[Value, Value, Value, Value]:
        return self.k, self.v, self.g, self.beta

    def only(self, valid: Value) -> Tokens:
        """Tokens where `valid` [B, T] is false become ones without effect."""
        return Tokens(*(valid.unsqueeze(2).where(part, 0.0) for part in self.parts()))


def build(c: Context) -> dict[str, Value]:
    s = c.sizes
    rows = common.step_rows(c["slots"], c["past_len"], c["new_len"], s["P"])
    q, new, conv_state = _project(c, rows)
    accepted = (rows.new > 0).where(c["accepted"].cast("int64"), 0)
    fresh = (rows.past <= accepted).reshape(-1, 1, 1, 1, 1)
    stored = c["recurrent_state"].gather(rows.slot, 0)
    held = stored.cast(FLOAT).reshape(0, s["K"], s["V"] // s["K"], s["Dk"], s["Dv"])
    start = fresh.where(0.0, held)
    packed = c["pending_state"].gather(rows.slot, 0)
    pending = _unpack(c, packed).only(_before(c, s["W"], accepted))
    prefill = c["qkv"].dim(1) > s["W"]
    y, state, kept = c.by_steps(
        prefill, lambda: _prefill(c, start, pending, q, new), lambda: _decode(c, start, pending, q, new)
    )
    # What is written must depend on what was read from the same memory, or a runtime may write first.
    kept = (rows.new > 0).reshape(-1, 1, 1).where(kept, packed)
    return {
        "y": _gate(c, y).cast(c.dtypes["T"]),
        "conv_state_out": conv_state,
        "recurrent_state_out": common.write_slots(c["recurrent_state"], rows.slot, state.cast(c.dtypes["U"])),
        "pending_state_out": common.write_slots(c["pending_state"], rows.slot, kept),
    }


# --- before and after the rule ------------------------------


def _project(c: Context, rows: Rows) -> tuple[Value, Tokens, Value]:
    """q [B, S, K*Dk], the valid new tokens, and the conv state after them."""
    s = c.sizes
    ring = Ring(c["conv_state"].gather(rows.slot, 0), s["Q"], rows)
    conv_state = common.write_slots(c["conv_state"], rows.slot, ring.after(c["qkv"]))
    history = ring.before(s["width"] - 1)
    mixed = common.silu(common.causal_conv(history, c["qkv"], c["conv_weight"], s["width"]))
    keys = s["K"] * s["Dk"]
    q, k, v = mixed[:, :, :keys], mixed[:, :, keys : 2 * keys], mixed[:, :, 2 * keys :]
    decay = -c["A_log"].op("Exp") * (c["a"].cast(FLOAT) + c["dt_bias"]).op("Softplus")
    new = Tokens(_unit_heads(c, k), v, decay, c["b"].cast(FLOAT).op("Sigmoid"))
    return _unit_heads(c, q) * s["Dk"] ** -0.5, new.only(_before(c, c["qkv"].dim(1), rows.new)), conv_state


def _unit_heads(c: Context, x: Value) -> Value:
    """L2 normalisation of each key head; x [B, S, K*Dk]."""
    heads = x.reshape(0, 0, c.sizes["K"], c.sizes["Dk"])
    norm = ((heads * heads).reduce("Sum", -1, keep=True) + L2_EPS).op("Sqrt")
    return (heads / norm).reshape(0, 0, c.sizes["K"] * c.sizes["Dk"])


def _before(c: Context, count: Value | int, end: Value) -> Value:
    """[B, count]: whether a token's index is below its row's end."""
    return c.body.arange(count) < end.unsqueeze(1)


def _unpack(c: Context, packed: Value) -> Tokens:
    """[k | v | g | beta] in the pending state's columns."""
    s = c.sizes
    widths = (s["K"] * s["Dk"], s["V"] * s["Dv"], s["V"], s["V"])
    ends = list(accumulate(widths))
    return Tokens(*(packed[:, :, end - width : end] for end, width in zip(ends, widths, strict=True)))


def _gate(c: Context, y: Value) -> Value:
    """w * rmsnorm(y) * act(z), for y [B, S, V, Dv]."""
    z = c["z"].cast(FLOAT)
    act = z.op("Sigmoid") if c.attributes["gate"] == "sigmoid" else common.silu(z)
    return (common.unit_rms(y, c.number("eps")) * c["norm_weight"]).reshape(0, 0, c.sizes["V"] * c.sizes["Dv"]) * act


# --- the two ways ------------------------------


def _decode(c: Context, start: Value, pending: Tokens, q: Value, new: Tokens) -> list[Value]:
    window, steps = c.sizes["W"], q.dim(1)
    padded = Tokens(*(part.pad_end(1, window - steps) for part in new.parts()))
    both = [c.body.concat([p, n], 1) for p, n in zip(pending.parts(), padded.parts(), strict=True)]
    chunk = delta_rule.solve(start, *_by_head(c, Tokens(*both)), 2 * window)
    # The pending rows' outputs are not wanted; their queries are zeros.
    queries = q.op("Pad", c.body.sizes([window, window - steps]), c.body.constant(0.0, FLOAT), c.body.sizes([1]))
    y = chunk.outputs(_key_heads(c, queries))[:, :, :, window : steps + window]
    packed = c.body.concat(padded.parts(), 2)
    return [_by_token(c, y), _flat_state(c, chunk.state_after(window)), packed]


def _prefill(c: Context, start: Value, pending: Tokens, q: Value, new: Tokens) -> list[Value]:
    s, steps = c.sizes, q.dim(1)
    committed = delta_rule.solve(start, *_by_head(c, pending), s["W"]).state_after(s["W"])
    count = (steps + (CHUNK - 1)) // CHUNK
    pieces = [common.tiles(part, count, CHUNK) for part in (q, *new.parts())]

    def step(index: Value, state: Value) -> tuple[list[Value], list[Value]]:
        queries, *parts = (piece.gather(index, 0) for piece in pieces)
        chunk = delta_rule.solve(state, *_by_head(c, Tokens(*parts)), CHUNK)
        return [chunk.state_after(CHUNK)], [_by_token(c, chunk.outputs(_key_heads(c, queries)))]

    state, y = c.body.loop(count, [committed], step)
    joined = y.transpose(1, 0, 2, 3, 4).reshape(0, -1, s["V"], s["Dv"])[:, :steps]
    nothing = common.zeros_like(c.body.concat(pending.parts(), 2))
    return [joined, _flat_state(c, state), nothing]


# --- layouts ------------------------------


def _by_head(c: Context, t: Tokens) -> tuple[Value, Value, Value, Value]:
    """k, v, g, beta as the delta rule wants them."""
    group = c.sizes["V"] // c.sizes["K"]
    v = t.v.reshape(0, 0, c.sizes["K"], group, c.sizes["Dv"]).transpose(0, 2, 3, 1, 4)
    g, beta = (x.reshape(0, 0, c.sizes["K"], group).transpose(0, 2, 3, 1) for x in (t.g, t.beta))
    return _key_heads(c, t.k), v, g, beta


def _key_heads(c: Context, x: Value) -> Value:
    """[B, T, K*Dk] -> [B, K, 1, T, Dk]."""
    return x.reshape(0, 0, c.sizes["K"], c.sizes["Dk"]).transpose(0, 2, 1, 3).unsqueeze(2)


def _by_token(c: Context, y: Value) -> Value:
    """[B, K, R, T, Dv] -> [B, T, V, Dv]."""
    return y.transpose(0, 3, 1, 2, 4).reshape(0, 0, c.sizes["V"], c.sizes["Dv"])


def _flat_state(c: Context, state: Value) -> Value:
    return state.reshape(0, c.sizes["V"], c.sizes["Dk"], c.sizes["Dv"])
