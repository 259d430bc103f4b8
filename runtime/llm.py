"""The runtime's front door: a bundle as an object that generates, streams, chats and scores.

    from flashnext.runtime import LLM, SamplingParams

    with LLM("bundle") as llm:
        outputs = llm.generate(["text", [1, 2, 3]], SamplingParams(max_tokens=16, temperature=0.0))
        for piece in llm.stream("text"):
            print(piece, end="", flush=True)

An `LLM` belongs to one thread. A stream that is not read to its end keeps its slot until it is closed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import scoring
from flashnext.runtime.chat import ChatTemplate, Message
from flashnext.runtime.counts import MOST_BYTES, check_count, check_threads
from flashnext.runtime.decode_loop import CLOSED, DecodeLoop, Watch
from flashnext.runtime.engines.engine_set import EngineOptions
from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.outputs import Piece, RequestOutput
from flashnext.runtime.prefix_cache import PrefixCache
from flashnext.runtime.request import Request, check_prompt
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.sequence import Sequence as TokenSequence
from flashnext.runtime.speculation import drafters_of
from flashnext.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A bundle, opened.

    Args:
        bundle: folder made by `flashnext export`.
        engine: "onnxruntime", "torch" (the PyTorch model; on a GPU with the CUDA kernels), "tensorrt" or "tensorrt-rtx"
            (what `flashnext build` made).
        checkpoint: where the weights are, when not where the bundle says.
        threads: threads of the engine; its own choice when None.
        prefill_chunk: most tokens of a prompt that are run in one step; fewer if the engine was built for fewer.
        max_batch: most sequences at once; when None as many as the bundle has slots, and the engine was built for.
        max_waiting: most requests that may wait for a slot; more are refused. Any number when None.
        prefix_cache_bytes: memory for states of prompts, which prompts that start the same begin with (0: off).
        ngram_table: how the n-gram table is kept: "mapped" (in its files), or in memory for good: "locked" (its files
            in the page cache), "huge" (a copy in huge pages), "pinned" (a copy that a GPU may read, and with
            `ngram_gather="device"` does).
        ngram_cache_bytes: memory for rows of a mapped n-gram table that were read before (0: off); for machines whose
            memory does not hold the table.
        engine_options: fields of `flashnext.runtime.engines.engine_set.EngineOptions`, such as `engine_path`,
            `ngram_gather`, or `providers` (those of ONNX Runtime: names or (name, options) pairs).

    Raises:
        FlashNextError: a bundle, checkpoint, engine or option that cannot be used, in one sentence.
    """

    def __init__(
        self,
        bundle: str | Path,
        engine: str = "onnxruntime",
        checkpoint: str | Path | None = None,
        threads: int | None = None,
        prefill_chunk: int = 512,
        max_batch: int | None = None,
        max_waiting: int | None = None,
        prefix_cache_bytes: int = 0,
        ngram_table: str = "mapped",
        ngram_cache_bytes: int = 0,
        **engine_options: Any,
    ) -> None:
        manifest = Manifest.read(bundle)
        check_threads(threads)
        check_count("prefill_chunk", prefill_chunk)
        for name, limit in {"max_batch": max_batch, "max_waiting": max_waiting}.items():
            if limit is not None:
                check_count(name, limit)
        for name, size in {"prefix_cache_bytes": prefix_cache_bytes, "ngram_cache_bytes": ngram_cache_bytes}.items():
            check_count(name, size, MOST_BYTES, least=0)
        self._scheduler = Scheduler(
            manifest.slots, manifest.window, prefill_chunk, max_batch, max_waiting, self._restore
        )
        self.tokenizer = Tokenizer.open(Path(bundle))
        self._chat_template = ChatTemplate.open(Path(bundle))
        options = EngineOptions.of(threads=threads, **engine_options)
        self._runner: ModelRunner | None = ModelRunner.open(
            bundle, engine, checkpoint, None, options, ngram_table, ngram_cache_bytes
        )
        self.manifest = self._runner.manifest
        if prefix_cache_bytes and self._runner.states_elsewhere:
            self._runner.close()
            raise RequestError(
                f"prefix_cache_bytes = {prefix_cache_bytes} needs states that can be read, and the engine {engine} "
                "keeps them on its device. Leave it out, or choose the engine tensorrt."
            )
        self._score_chunk = self._fit(self._runner, prefill_chunk, max_batch)
        block = self.manifest.config.indexer_compress_ratio
        self._cache = PrefixCache(self._runner.states, block, prefix_cache_bytes)
        self._loop = DecodeLoop(self._runner, self._scheduler, drafters_of(self._runner), self._cache)

    # --- generating ------------------------------

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts (text, or lists of token ids) to their ends; outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter that cannot be served; then nothing was run.
        """
        self._open_runner()
        many = [prompts] if isinstance(prompts, str) else _prompts(prompts)
        requests = [self._request(p, s) for p, s in zip(many, _params(params, len(many)), strict=True)]
        self._loop.run(requests)
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, watch: Watch | None = None
    ) -> Generator[Piece, None, None]:
        """Run one prompt and yield what is said as it comes; the prompt is checked before the first step.

        `watch` is told, after every step, how many tokens of the prompt have been run.
        """
        self._open_runner()
        if watch is not None and not callable(watch):
            raise RequestError(f"watch must be a function of one number, or None; found {watch!r:.80}.")
        (wishes,) = _params(params, 1)
        return self._loop.stream(self._request(prompt, wishes), watch)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; `variables` go to the chat template."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(f"A chat needs a list of messages, found {messages!r:.80}.")
        several = len(messages) > 0 and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.chat_prompt(c, tools, **variables) for c in conversations], params)

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins (for `stream`)."""
        if self._chat_template is None or self.tokenizer is None:
            raise RequestError("The bundle has no chat template; give the prompt as text or token ids.")
        text = self._chat_template.render(messages, tools=tools, **variables)
        return self.tokenizer.encode(text, special=False)

    # --- scoring ------------------------------

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Logits [T, vocabulary] of each sequence of token ids: row t predicts token t + 1."""
        return self._score(scoring.score, sequences)

    def score_draft(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Draft layer's logits [T - 1, vocabulary]: row t predicts token t + 2 from (state t, token t + 1)."""
        return self._score(scoring.score_draft, sequences)

    def _score(self, function: Any, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        runner = self._open_runner()
        if isinstance(sequences, str) or not isinstance(sequences, Sequence | np.ndarray):
            raise RequestError(f"Scores need a list of sequences of token ids: [[1, 2, 3]]; found {sequences!r:.80}.")
        checked = [check_prompt(_ids(s), self.manifest) for s in sequences]
        with self._scheduler.borrow_slot() as slot:
            return [function(runner, slot, tokens, self._score_chunk) for tokens in checked]

    # --- life ------------------------------

    def close(self) -> None:
        """Let go of engines, states and mapped files; twice does no harm."""
        self._loop.close()
        if self._runner is not None:
            self._runner.close()
            self._cache.clear()
        self._runner = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fit(self, runner: ModelRunner, chunk: int, max_batch: int | None) -> int:
        """Keep to the steps that the engine was built for; returns the chunk for scores, which want all logits.

        Raises:
            EngineError: it was asked for more sequences at once.
        """
        limits = runner.limits
        if limits is None:
            return chunk
        try:
            limits.check_sequences(max_batch or 1)
        except EngineError:
            runner.close()
            raise
        self._scheduler.limit(limits.sequences, limits.tokens)
        return min(chunk, limits.tokens, limits.logit_rows)

    def _restore(self, sequence: TokenSequence) -> None:
        self._cache.restore(sequence)

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RequestError(CLOSED)
        return self._runner

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(prompt, str):
            return Request(self.manifest, _ids(prompt), params, self.tokenizer)
        if self.tokenizer is None:
            raise RequestError("The bundle has no tokenizer.json; give the prompt as a list of token ids.")
        return Request(self.manifest, self.tokenizer.encode(prompt), params, self.tokenizer, prompt)


def _prompts(prompts: Any) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise RequestError(f"Prompts must be text or a list of prompts, found {type(prompts).__name__}.")
    if any(isinstance(p, (int, np.integer)) for p in prompts):
        raise RequestError("A prompt of token ids belongs in a list of prompts: [[1, 2, 3]].")
    return list(prompts)


def _ids(prompt: Any) -> Any:
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise RequestError(f"A prompt must be text or a list of token ids, found {type(prompt).__name__}.")
    return prompt


def _params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"Sampling parameters must be a SamplingParams, or one for each prompt; found {params!r:.80}."
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts and {len(params)} sampling parameters; give one for all or one for each.")
    return list(params)
