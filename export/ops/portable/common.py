"""What the portable ops share: norms and activations, the rows that a step may touch, rotation, recent-token rings.

Memory that a step must not see may hold anything, NaN included, so it is dropped with Where, never with a product.
Everything that a step must not write goes to a place that nobody reads: slot P - 1, token row C1 - 1.

One buffer may be a state's input and output. So whatever is read of a state before its write must be something that
the written values depend on: only data dependence keeps a runtime from writing first.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnext.export.ops.portable.builder import Size, Value

FLOAT = "float32"


def silu(x: Value) -> Value:
    return x * x.op("Sigmoid")


def zeros_like(x: Value) -> Value:
    """float32 zeros of x's shape."""
    return x.op("Shape", dtype="int64").op("ConstantOfShape", dtype=FLOAT)


def unit_rms(x: Value, eps: float) -> Value:
    """x / rms(x) over the last axis."""
    return x / ((x * x).reduce("Mean", -1, keep=True) + eps).op("Sqrt")


def rms_norm(x: Value, weight: Value, eps: float) -> Value:
    """Zero-centred RMSNorm over the last axis."""
    return unit_rms(x, eps) * (weight.cast(FLOAT) + 1.0)


def linear(x: Value, weight: Value) -> Value:
    """x [..., in] by weight [out, in]."""
    return x @ weight.cast(FLOAT).transpose(1, 0)


@dataclass(frozen=True)
class Rows:
    """The sequences of a step, int64 [B]. A row without new tokens counts as empty and writes to the trash slot."""

    slot: Value
    past: Value
    new: Value

    @property
    def total(self) -> Value:
        """Tokens once this step is done."""
        return self.past + self.new


def step_rows(slots: Value, past_len: Value, new_len: Value, slot_rows: int) -> Rows:
    idle = new_len.equal(0)
    slot = idle.where(slot_rows - 1, slots)
    return Rows(slot.cast("int64"), idle.where(0, past_len).cast("int64"), new_len.cast("int64"))


def positions(rows: Rows, steps: Size) -> Value:
    """Position of each token of the step, int64 [B, S]."""
    return rows.past.unsqueeze(1) + rows.past.body.arange(steps)


def pairs(slot: Value, index: Value) -> Value:
    """Places [B, N, 2] of elements [B, N] in each row's slot, for GatherND and ScatterND."""
    return index.body.concat([(slot.unsqueeze(1) + index * 0).unsqueeze(2), index.unsqueeze(2)], 2)


def longest(lengths: Value) -> Value:
    """The largest of lengths [B] as a size, at least 1."""
    return lengths.reduce("Max", 0, keep=True).op("Max", 1)


def write_slots(state: Value, slot: Value, rows: Value) -> Value:
    """The state [P, ...] with whole slots replaced by rows [B, ...]."""
    return state.scatter_nd(slot.unsqueeze(1), rows)


@dataclass(frozen=True)
class Ring:
    """The slots' recent tokens [B, Q, C]: position p is in row p mod Q. Read before the step's tokens are written."""

    held: Value
    size: int
    rows: Rows

    def before(self, count: int) -> Value:
        """The `count` positions before the step's first token, [B, count, C]; zero before the sequence starts."""
        body = self.held.body
        position = self.rows.past.unsqueeze(1) + body.constant(range(-count, 0), "int64")
        # Position + a multiple of Q is not negative: Mod's sign rule differs between runtimes.
        row = (position + count // self.size * self.size + self.size) % self.size
        taken = self.held.gather_nd(row.unsqueeze(-1), batch_dims=1)
        return (position >= 0).unsqueeze(-1).where(taken, 0)

    def after(self, tokens: Value) -> Value:
        """The ring once the step's valid tokens [B, S, C] are in it: each row keeps its latest position."""
        body = self.held.body
        back = self.rows.total.unsqueeze(1) - 1 + (self.size - body.arange(self.size))
        latest = self.rows.total.unsqueeze(1) - 1 - back % self.size
        token = latest - self.rows.past.unsqueeze(1)
        index = token.op("Max", 0).unsqueeze(-1)
        return (token >= 0).unsqueeze(-1).where(tokens.gather_nd(index, batch_dims=1), self.held)


def causal_conv(history: Value, tokens: Value, weight: Value, width: int, dilation: int = 1) -> Value:
    """Depthwise causal convolution of tokens [B, S, C] after their history; weight [C, 1, width]; float32.

    A sum of shifted products: a runtime's grouped convolution would go channel by channel.
    """
    reach = (width - 1) * dilation
    window = history.body.concat([history, tokens], 1).cast(FLOAT)
    taps = weight.cast(FLOAT).squeeze(1).transpose(1, 0)
    total = window[:, reach:] * taps[width - 1 :]
    for i in range(width - 1):
        total = total + window[:, i * dilation : i * dilation - reach] * taps[i : i + 1]
    return total


def rotation(position: Value, inv_freq: Value, scale: float) -> tuple[Value, Value]:
    """cos and sin [..., 1, F] for positions [...], to turn heads [..., heads, D]."""
    angle = position.cast(FLOAT).unsqueeze(-1, -2) * inv_freq
    return angle.op("Cos") * scale, angle.op("Sin") * scale


def rotate(x: Value, turn: tuple[Value, Value], half: int, width: int) -> Value:
    """RoPE on the first 2F of the last axis' columns; column i turns with column i + F."""
    cos, sin = turn
    first, second = x[..., :half], x[..., half : 2 * half]
    rest = [x[..., 2 * half :]] if 2 * half < width else []
    return x.body.concat([first * cos - second * sin, second * cos + first * sin, *rest], -1)


def tiles(x: Value, count: Value, size: int) -> Value:
    """[B, S, C] -> [count, B, size, C], zeros after the last token: what a Loop takes piece by piece."""
    return x.pad_end(1, count * size - x.dim(1)).reshape(0, count, size, -1).transpose(1, 0, 2, 3)
