"""Which roundings the chunked delta rule bears: errors of its products in BF16, in single and in split operands.

    python benchmarks/delta_rule_precision.py                    # a minute; no GPU
    python benchmarks/delta_rule_precision.py --tokens 4096

The rule over chunks of 64 tokens as plugins/gated_delta_net/chunks.h has it, one head of 128 x 128, in float64 but for
what is rounded: every result to float, every operand of a product to one BF16 number or to the sum of two.
Compared with the rule token by token in float64. Prints the error of the normalised outputs relative to their norm, and
the worst element in BF16 steps of its row's largest value; ends with one JSON line, which has the states' errors too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnext.runtime.cli.parser import whole_number

DIM, CHUNK, EPS = 128, 64, 1e-6
OPERANDS = ("q", "k", "S", "T", "X", "P", "N")
TWO = dict.fromkeys(OPERANDS, 2)
ALL_BUT_V = TWO | {"v": 1}
KERNEL = ALL_BUT_V | {"S in k S": 1}
"""BF16 numbers for each operand; S is two in q S and one in k S ("S in k S")."""
VARIANTS: dict[str, Mapping[str, int]] = {
    "the kernels' choice": KERNEL,
    "S twice in k S too": ALL_BUT_V,
    "S and v twice too": TWO | {"v": 2},
    **{f"{name} once": KERNEL | {name: 1} for name in OPERANDS},
    "everything once": dict.fromkeys((*OPERANDS, "v"), 1),
}
KINDS = ("free", "long", "near 0.3", "near 0.1", "near 0.01", "equal")


@dataclass(frozen=True)
class Tokens:
    """One head's tokens: q, k, v [T, 128], log decay and beta [T]; float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def tokens(kind: str, count: int, seed: int = 0) -> Tokens:
    """ "free": independent, "long": likewise, hardly any decay; "near x": keys differ by x; "equal": not at all."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, DIM, generator=g) for _ in "qkv")
    beta, decay = torch.rand(count, generator=g), -torch.rand(count, generator=g)
    if kind not in ("free", "long"):
        k = k[:1] + (float(kind.split()[1]) if " " in kind else 0.0) * k
        beta = 1 - 1e-6 * beta
    if kind != "free":
        decay = decay * 1e-4
    q, k, v = (torch.nn.functional.silu(x) for x in (q, k, v))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return Tokens(*(x.float().double() for x in (q * DIM**-0.5, k, v, decay, beta)))


def token_by_token(t: Tokens) -> tuple[Tensor, Tensor]:
    """Outputs [T, 128] and the final state."""
    state, outputs = torch.zeros(DIM, DIM, dtype=torch.float64), []
    for q, k, v, decay, beta in zip(t.q, t.k, t.v, t.decay, t.beta, strict=True):
        state = decay.exp() * state
        state = state + beta * torch.outer(k, v - state.T @ k)
        outputs.append(state.T @ q)
    return torch.stack(outputs), state


def by_chunks(t: Tokens, parts: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """The same by chunks, with the operands in that many BF16 numbers."""

    def times(a: Tensor, a_parts: int, b: Tensor, b_parts: int) -> Tensor:
        first, second = _split(a, a_parts), _split(b, b_parts)
        both = [x @ y for i, x in enumerate(first) for j, y in enumerate(second) if i + j < 2]  # not low times low
        return _float(torch.stack(both).sum(0))

    state, outputs = torch.zeros(DIM, DIM, dtype=torch.float64), []
    n, in_keys = parts, parts.get("S in k S", parts["S"])
    for begin in range(0, len(t.k), CHUNK):
        q, k, decay, beta = (x[begin : begin + CHUNK] for x in (t.q, t.k, t.decay, t.beta))
        v = torch.stack(_split(t.v[begin : begin + CHUNK], parts["v"])).sum(0)
        sums = decay.cumsum(0)
        spans = torch.tril((sums[:, None] - sums).clamp(max=0).exp())
        start, end = sums.exp()[:, None], (sums[-1] - sums).exp()[:, None]
        system = torch.tril(times(k, n["k"], k.T, n["k"]) * spans * beta[:, None], -1)
        inverse = _float(torch.linalg.inv(torch.eye(len(k), dtype=torch.float64) + _float(system)))
        scores = _float(times(q, n["q"], k.T, n["k"]) * spans)
        x = _float(beta[:, None] * (v - start * times(k, n["k"], state, in_keys)))
        new = times(inverse, n["T"], x, n["X"])
        outputs.append(start * times(q, n["q"], state, n["S"]) + times(scores, n["P"], new, n["N"]))
        state = _float(start[-1] * state + times(k.T, n["k"], _float(end * new), n["N"]))
    return torch.cat(outputs), state


def _split(x: Tensor, parts: int) -> list[Tensor]:
    high = x.bfloat16().double()
    return [high] if parts == 1 else [high, (x - high).bfloat16().double()]


def _float(x: Tensor) -> Tensor:
    return x.float().double()


def errors(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of the normalised outputs and of the state."""
    y, exact = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) for x in (got[0], want[0]))
    step = torch.exp2(exact.abs().amax(-1, keepdim=True).log2().floor() - 7)
    return {
        "y": float((y - exact).norm() / exact.norm()),
        "steps": float(((y - exact).abs() / step).max()),
        "state": float((got[1] - want[1]).norm() / want[1].norm()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Errors of the chunked delta rule by what is rounded to BF16.")
    parser.add_argument("--tokens", type=whole_number(1), default=1024, help="length of the sequence (default: 1024)")
    options = parser.parse_args(arguments)
    made = {kind: tokens(kind, options.tokens) for kind in KINDS}
    wanted = {kind: token_by_token(t) for kind, t in made.items()}
    print("| operands |", " | ".join(KINDS), "|", "\n|" + " --- |" * (len(KINDS) + 1))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, parts in VARIANTS.items():
        results[name] = {kind: errors(by_chunks(t, parts), wanted[kind]) for kind, t in made.items()}
        print(f"| {name} |", " | ".join(f"{e['y']:.1e}, {e['steps']:.1f}" for e in results[name].values()), "|")
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
