"""The report of a calibration as plain data: everything that the page shows, and the recommendation with its rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashnext.calibration.residual.calibrate import DYNAMIC, Findings
from flashnext.calibration.residual.observers import PERCENTILES, StoreStatistics
from flashnext.calibration.residual.quality import PROMPT_TOKENS, WRITTEN_TOKENS, Quality
from flashnext.calibration.residual.search import METHODS
from flashnext.calibration.residual.text import Windows

FORMAT_VERSION = 1
LOSS_BOUND = 0.01
"""Nats per token that FP8 may cost."""
EQUAL_DIVERGENCE = 1.25
"""Less than the luck of single roundings makes of equal scales on some thousand tokens."""
AS_GOOD = 1.1
"""The maximum's scale is as good as another whose error of the block input is not smaller by more than this factor."""
SIMPLEST_FIRST = (METHODS[0], *sorted(METHODS[1:-2], key=lambda m: -float(m.split("-")[1])), *METHODS[-2:])
RULE = (
    "Of the static e4m3 scales with rounding to nearest, those whose divergence (KL) from the unquantized model is at "
    f"most {EQUAL_DIVERGENCE:g} times the least of them count as equal, and the simplest of these is taken: maximum, "
    "percentiles from the highest down, squared error, block input. It is recommended if it costs at most "
    f"{LOSS_BOUND:g} nats per token both on held-out text (difference of the losses) and on the unquantized model's "
    "own text (the divergence); else dynamic e4m3 scales by the same bounds, else BF16. Where BF16 itself costs more, "
    "nothing is recommended."
)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The way to store the residual, and why in one sentence."""

    way: str
    sentence: str
    rule: str = RULE


def recommend(quality: Sequence[Quality]) -> Recommendation:
    """Apply `RULE` to the figures of the ways; they have all static e4m3 methods and the dynamic scales."""
    by_name = {q.name: q for q in quality}
    static = [by_name[f"e4m3 static {m}"] for m in SIMPLEST_FIRST]
    least = min(q.divergence for q in static)
    best = next(q for q in static if q.divergence <= least * EQUAL_DIVERGENCE)
    dynamic = by_name[f"e4m3 {DYNAMIC}"]
    for way in (best, dynamic):
        if _cost(way) <= LOSS_BOUND:
            return Recommendation(way.name, f"Store the residual as {way.name}: {_figures(way)}.")
    bf16 = by_name["bf16"]
    if _cost(bf16) > LOSS_BOUND:
        return Recommendation(
            "none",
            f"Nothing can be recommended: the model amplifies every rounding, BF16's too, which diverges by "
            f"{bf16.divergence:.4f} nats ({best.name}: {best.divergence:.4f}).",
        )
    return Recommendation(
        "bf16",
        f"Keep the residual in BF16: {best.name} costs {_cost(best):.4f} nats and {dynamic.name} {_cost(dynamic):.4f}, "
        f"more than the {LOSS_BOUND:g} that FP8 may cost.",
    )


def _cost(way: Quality) -> float:
    """Nats per token, on held-out text or on the unquantized model's own, whichever is more. The divergence is what is
    paid on the latter, where a difference of losses on foreign text could be luck."""
    return max(way.loss_difference, way.divergence)


def _figures(way: Quality) -> str:
    return (
        f"its loss on held-out text is {way.loss_difference:+.4f} nats (standard error {way.standard_error:.4f}) from "
        f"the unquantized model's, the divergence {way.divergence:.4f} nats, and {way.agreement:.1%} of the most "
        "likely next tokens are the same"
    )


def build(findings: Findings) -> dict[str, Any]:
    """The report as JSON data."""
    config = findings.checkpoint.config
    return {
        "format_version": FORMAT_VERSION,
        "checkpoint": {
            "folder": str(findings.checkpoint.folder),
            "identity": findings.identity,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "branches": config.hc_count,
        },
        "text": _text(findings.text),
        "held_out": _text(findings.held_out),
        "recommendation": dataclasses.asdict(recommend(findings.quality)),
        "maximum": maximum_is_as_good(findings),
        "quality": [
            {**dataclasses.asdict(q), "perplexity": q.perplexity, "greedy_mean": q.greedy_mean}
            for q in findings.quality
        ],
        "greedy": {"prompt_tokens": PROMPT_TOKENS, "written_tokens": WRITTEN_TOKENS},
        "stores": {name: _store(s) for name, s in findings.statistics.stores.items()},
        "scales": findings.scales,
        "input_errors": findings.input_errors,
        "lost": {
            method: {store: {"by_number": n, "by_energy": e} for store, (n, e) in of.items()}
            for method, of in findings.lost.items()
        },
    }


def maximum_is_as_good(findings: Findings) -> dict[str, Any]:
    """Where a searched scale serves the next block better than the maximum's, and one sentence about it."""
    plain, found = findings.input_errors["max"], findings.input_errors["input"]
    pairs = [(s, b, p, f) for s in plain for b, (p, f) in enumerate(zip(plain[s], found[s], strict=True))]
    better = [
        {"store": s, "branch": b, "max": p, "input": f, "factor": p / f} for s, b, p, f in pairs if p > AS_GOOD * f > 0
    ]
    better.sort(key=lambda row: -row["factor"])  # type: ignore[operator]
    equal = len(pairs) - len(better)
    sentence = f"The maximum's scale is as good as a searched one at {equal} of {len(pairs)} stores and branches"
    if better:
        worst = better[0]
        sentence += (
            f"; most is lost at {worst['store']}, branch {worst['branch']}, where its error of the next block's input "
            f"is {worst['factor']:.1f} times that of the searched scale"
        )
    return {"sentence": sentence + ".", "as_good": equal, "of": len(pairs), "better_searched": better}


def _text(windows: Windows) -> dict[str, Any]:
    return {**dataclasses.asdict(windows.record()), "tokens": windows.count}


def _store(statistics: StoreStatistics) -> dict[str, Any]:
    lost = {name: counts.shares() for name, counts in statistics.lost.items()}
    return {
        "tokens": statistics.tokens,
        "max": statistics.largest(),
        "rms": statistics.rms(),
        "percentiles": {str(p): statistics.percentiles(p) for p in PERCENTILES},
        "token_maxima": {str(p): statistics.token_percentiles(p) for p in (50, *PERCENTILES)},
        "outlier_channels": [
            [{"channel": c, "times_median": t} for c, t in of_branch] for of_branch in statistics.outlier_channels()
        ],
        "octaves": [
            dict(zip(("exponents", "counts"), statistics.occupied(b), strict=True)) for b in range(len(lost["e4m3"][0]))
        ],
        "lost_with_dynamic_scales": {f: {"by_number": n, "by_energy": e} for f, (n, e) in lost.items()},
    }
