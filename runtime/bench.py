"""Latency and throughput of a bundle, as a user of one request or a few sees them; `flashnext bench` prints it.

    runner = ModelRunner.open("bundle")
    result = measure(runner, Load(prompt_length=256, batch=4, output_tokens=64))

All requests of a load arrive at once. *Time to first token* counts from there, queueing included. *Time per output
token* is the time between a request's tokens; several tokens from one step (speculation) share its time. Clocks are
monotonic, and a load is run once before it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.errors import EngineError, RequestError
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.request import Request
from flashnext.runtime.row_metrics import RowMetrics
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.speculation import drafters_of

Tokens = Sequence[int]


@dataclass(frozen=True)
class Load:
    """So many requests at once, each with a prompt and an output of these lengths (greedy, to the end)."""

    prompt_length: int
    batch: int
    output_tokens: int
    draft_tokens: int = 0
    drafter: str = "mtp"
    repeats: int = 3

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            draft_tokens=self.draft_tokens,
            drafter=self.drafter,
        )


@dataclass
class Result:
    """Seconds over all requests and repeats of one load."""

    load: Load
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    ngram_rows: RowMetrics = field(default_factory=RowMetrics)
    kept_drafts: int = 0
    verifications: int = 0

    def facts(self) -> dict[str, Any]:
        """As plain data; times in milliseconds."""
        facts: dict[str, Any] = {
            "prompt_length": self.load.prompt_length,
            "batch": self.load.batch,
            "output_tokens": self.load.output_tokens,
            "first_token_ms": _quantiles(self.first_token),
            "per_token_ms": _quantiles(self.per_token),
            "tokens_per_second": float(np.median(self.tokens_per_second)),
        }
        if self.ngram_rows.counts.rows:
            facts["ngram_rows"] = self.ngram_rows.facts()
        if self.verifications:
            facts["draft_tokens"] = self.load.draft_tokens
            facts["acceptance_length"] = 1 + self.kept_drafts / self.verifications
        return facts


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.quantile(seconds, q / 100)) * 1e3 for q in (50, 95, 99)}


def prompts(vocabulary: int, load: Load, text: Tokens = (), seed: int = 0) -> list[list[int]]:
    """A prompt for each request: different places of the text, or random ids without one.

    Raises:
        RequestError: the text is shorter than a prompt.
    """
    rng = np.random.default_rng(seed)
    if not text:
        return [rng.integers(0, vocabulary, load.prompt_length).tolist() for _ in range(load.batch)]
    if len(text) < load.prompt_length:
        raise RequestError(f"The text has {len(text)} tokens and a prompt takes {load.prompt_length}. Give more text.")
    starts = np.linspace(0, len(text) - load.prompt_length, load.batch, dtype=int)
    return [list(text[s : s + load.prompt_length]) for s in starts]


def measure(
    runner: ModelRunner,
    load: Load,
    text: Tokens = (),
    progress: Callable[[int], object] = lambda runs: None,
    chunk: int = 512,
) -> Result:
    """Run a load once to warm up and `repeats` times for its result; `progress` is told of each run.

    Prompts are run in chunks of at most `chunk` tokens.

    Raises:
        RequestError: the load does not fit the bundle's slots.
    """
    result = Result(load)
    given = prompts(runner.manifest.config.vocab_size, load, text)
    for repeat in range(load.repeats + 1):
        runner.take_row_metrics()
        times, requests = _run(runner, load, given, chunk)
        progress(1)
        if repeat:
            _add(result, runner, times, requests)
    return result


def _run(
    runner: ModelRunner, load: Load, given: Sequence[Tokens], chunk: int
) -> tuple[list[list[float]], list[Request]]:
    """Seconds from the start to each token of each request."""
    manifest = runner.manifest
    requests = [Request(manifest, tokens, load.params(), None) for tokens in given]
    scheduler = Scheduler(manifest.slots, manifest.window, chunk, max_batch=load.batch)
    if runner.limits:
        scheduler.limit(runner.limits.sequences, runner.limits.tokens)
    loop = DecodeLoop(runner, scheduler, drafters_of(runner))
    times: list[list[float]] = [[] for _ in requests]
    start = time.perf_counter()
    for request in requests:
        loop.add(request)
    while not all(request.done for request in requests):
        loop.advance()
        now = time.perf_counter() - start
        for request, seen in zip(requests, times, strict=True):
            if request.error:
                raise request.error
            seen += [now] * (request.sequence.output_length - len(seen))
    return times, requests


def _add(result: Result, runner: ModelRunner, times: Sequence[Sequence[float]], requests: Sequence[Request]) -> None:
    for seen in times:
        result.first_token.append(seen[0])
        result.per_token += _gaps(seen)
    result.tokens_per_second.append(sum(map(len, times)) / max(seen[-1] for seen in times))
    result.ngram_rows.add(runner.take_row_metrics())
    drafts = [request.output().drafts for request in requests]
    result.kept_drafts += sum(d.kept for d in drafts)
    result.verifications += sum(d.steps for d in drafts)


def _gaps(seen: Sequence[float]) -> list[float]:
    """Time of each token after the first; tokens that came together share the time since those before them."""
    gaps: list[float] = []
    moments, counts = np.unique(np.array(seen), return_counts=True)
    for before, now, count in zip(moments[:-1], moments[1:], counts[1:], strict=True):
        gaps += [float(now - before) / int(count)] * int(count)
    return gaps


def measure_transformers(checkpoint: Path, load: Load, text: Tokens = (), threads: int | None = None) -> Result:
    """The same load on the transformers implementation, float32 on the CPU, all requests as one batch.

    Raises:
        EngineError: transformers (or PyTorch) is not installed, or does not know the model.
    """
    try:
        import torch
        import transformers
        from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM
    except ImportError as cause:
        raise EngineError(
            f"Comparing with transformers needs it and PyTorch ({cause}). Install them: pip install transformers torch."
        ) from None
    if threads:
        torch.set_num_threads(threads)
    logging: Any = transformers.logging  # without annotations, like the model
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()
    given = torch.tensor(prompts(model.config.vocab_size, load, text))
    result = Result(load)
    for repeat in range(load.repeats + 1):
        moments = []
        start = time.perf_counter()
        with torch.inference_mode():
            out = model(given, use_cache=True, logits_to_keep=1)
            for _ in range(load.output_tokens):
                token = out.logits[:, -1:].argmax(-1)
                moments.append(time.perf_counter() - start)
                if len(moments) < load.output_tokens:
                    out = model(token, past_key_values=out.past_key_values, use_cache=True)
        if repeat:
            result.first_token += [moments[0]] * load.batch
            result.per_token += _gaps(moments) * load.batch
            result.tokens_per_second.append(load.batch * len(moments) / moments[-1])
    return result
