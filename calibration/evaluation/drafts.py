"""How many drafted tokens are kept, greedily, by the decoder itself; with or without reuse of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashnext.runtime import SamplingParams
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.request import Request
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.speculation.mtp_drafter import MtpDrafter


def acceptance_lengths(
    bundle: Path, prompts: Sequence[Sequence[int]], new_tokens: int, most: int = 4, reuse_blocks: bool = True
) -> list[float]:
    """Tokens per verification for 1, 2, … `most` drafts: the kept drafts and the one token that a step always gives."""
    runner = ModelRunner.open(bundle, threads=1)
    try:
        drafter = MtpDrafter(runner, reuse_blocks)
        return [_acceptance_length(runner, drafter, prompts, new_tokens, drafts) for drafts in range(1, most + 1)]
    finally:
        runner.close()


def _acceptance_length(
    runner: ModelRunner, drafter: MtpDrafter, prompts: Sequence[Sequence[int]], new_tokens: int, drafts: int
) -> float:
    manifest = runner.manifest
    params = SamplingParams(
        max_tokens=new_tokens, temperature=0.0, ignore_eos=True, draft_tokens=drafts, draft_adaptive=False
    )
    requests = [Request(manifest, prompt, params, None) for prompt in prompts]
    DecodeLoop(runner, Scheduler(manifest.slots, manifest.window), {"mtp": drafter}).run(requests)
    counts = [request.output().drafts for request in requests]
    return 1 + sum(c.kept for c in counts) / sum(c.steps for c in counts)
