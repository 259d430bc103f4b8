"""The gated delta rule over a whole chunk of tokens at once, exact in float32.

Per value head the rule is S <- e^g S + beta k (v - (e^g S)^T k)^T. Over a chunk that starts from S_0, with
D[t, i] = exp(g_{i+1} + … + g_t) and D_start[t] = exp(g_1 + … + g_t):

    (I + A) w = beta * (v - D_start k S_0),   A[t, i] = beta_t D[t, i] k_t.k_i   for i < t
    y_t = D_start[t] q_t S_0 + sum_{i <= t} D[t, i] (q_t.k_i) w_i
    S_t = D_start[t] S_0     + sum_{i <= t} D[t, i] k_i w_i^T

Two choices keep this exact where the usual short cuts fail. The exponents are sums over each (i, t) span of their own:
differences of one running sum would lose the small decays that follow a large one. And I + A is inverted by block
doubling, in which no product exceeds the inverse itself; (I - A)(I + A^2)(I + A^4)… reaches 1e8 when keys repeat.

Layout: key heads K, each with R = V/K value heads: k, q [B, K, 1, T, Dk], v [B, K, R, T, Dv], g, beta [B, K, R, T],
S [B, K, R, Dk, Dv]. A token to be ignored has k = 0, g = 0, beta = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashnext.export.ops.portable.builder import Value

SWAP = (0, 1, 2, 4, 3)


@dataclass(frozen=True)
class Chunk:
    """A solved chunk: the weights w of its keys, and the decays between its tokens."""

    start: Value
    k: Value
    w: Value
    decay: Value
    start_decay: Value

    def outputs(self, q: Value) -> Value:
        """y [B, K, R, T, Dv]."""
        return self.start_decay * (q @ self.start) + ((q @ self.k.transpose(*SWAP)) * self.decay) @ self.w

    def state_after(self, tokens: int) -> Value:
        """S after the chunk's first `tokens` tokens."""
        last = slice(tokens - 1, tokens)
        weights = self.decay[:, :, :, last].transpose(*SWAP) * self.w  # later tokens have D = 0
        return self.start_decay[:, :, :, last] * self.start + self.k.transpose(*SWAP) @ weights


def solve(start: Value, k: Value, v: Value, g: Value, beta: Value, size: int) -> Chunk:
    """Solve a chunk of `size` tokens that starts from state `start`."""
    body = start.body
    strict = body.constant(np.tri(size, k=-1), "float32")
    spans = (g.unsqueeze(4) * strict).op("CumSum", body.constant(3, "int64"))  # [t, i]: g_{i+1} + … + g_t
    decay = spans.op("Exp") * body.constant(np.tri(size), "float32")
    start_decay = g.op("CumSum", body.constant(3, "int64")).op("Exp").unsqueeze(4)
    beta = beta.unsqueeze(4)
    mixing = (k @ k.transpose(*SWAP)) * decay * beta * strict
    error = (v - start_decay * (k @ start)) * beta
    return Chunk(start, k, unit_lower_inverse(mixing, size) @ error, decay, start_decay)


def unit_lower_inverse(strict: Value, size: int) -> Value:
    """(I + A)^-1 for strictly lower triangular A [..., T, T], by doubling the size of the inverted diagonal blocks.

    With X the inverse of the diagonal blocks of size m, and C the part of A that joins two of them into one of 2m:
    the inverse of the larger blocks is X - X C X.
    """
    body = strict.body
    row, column = np.indices((size, size))
    inverse, width = body.constant(np.eye(size), "float32"), 1
    while width < size:
        joins = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
        coupling = strict * body.constant(joins, "float32")
        inverse = inverse - (coupling if width == 1 else inverse @ coupling @ inverse)
        width *= 2
    return inverse
