"""`flashnext run`: generate text from a prompt, as it comes; or a conversation; or one JSON object for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashnext.export.progress import progress_bar
from flashnext.runtime.cli.engine_options import add_engine_options, engine_options
from flashnext.runtime.cli.ngram_options import add_ngram_options, given_ngram_gather, given_ngram_options
from flashnext.runtime.cli.parser import Commands, Parser, UsageError, token_ids
from flashnext.runtime.cli.prompts import Prompt, read_line, read_prompt, system_messages, to_tokens
from flashnext.runtime.cli.sampling_options import add_sampling_options, given_sampling

if TYPE_CHECKING:
    from flashnext.runtime import LLM, SamplingParams
    from flashnext.runtime.outputs import RequestOutput

DESCRIPTION = """\
Generate text from a prompt. The text streams to standard output, timings go to standard error."""

EXAMPLES = """\
examples:
  flashnext run BUNDLE --prompt "Once upon a time" --max-tokens 100
  flashnext run BUNDLE --chat --prompt "Why is the sky blue?"     one answer
  flashnext run BUNDLE --chat                                     a conversation; end it with Ctrl-D
  flashnext run BUNDLE --token-ids 1,2,3 --temperature 0          token ids in, the likeliest tokens out
  flashnext run BUNDLE --json --logprobs 5 < prompt.txt           the prompt from a file, one JSON object out
"""


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser("run", help="generate text", description=DESCRIPTION, epilog=EXAMPLES, parents=parents)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by `flashnext export`")
    group = parser.add_argument_group("prompt", "Without one, it is read from standard input.")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--prompt", metavar="TEXT", help="the prompt")
    one.add_argument("--token-ids", type=token_ids, metavar="IDS", help='the prompt as token ids, such as "1,2,3"')
    group.add_argument("--chat", action="store_true", help="the prompt is a user's turn, put into the chat template")
    group.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    add_sampling_options(parser)
    add_ngram_options(parser)
    add = parser.add_argument_group("engine and output").add_argument
    add_engine_options(add)
    add("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.runtime import LLM, SamplingParams

    params = SamplingParams(**given_sampling(arguments))
    if params.logprobs is not None and not arguments.json:
        raise UsageError("--logprobs needs --json, which has a place for them.")
    prompt = read_prompt(arguments)
    start = time.perf_counter()
    options = engine_options(arguments) | given_ngram_options(arguments) | given_ngram_gather(arguments)
    with LLM(arguments.bundle, arguments.engine, arguments.checkpoint, **options) as llm:
        _remark(f"loaded in {time.perf_counter() - start:.2f} s")
        if prompt is None:
            _converse(llm, params, arguments)
        elif arguments.json:
            print(json.dumps(_facts(llm.generate([to_tokens(llm, prompt, arguments)], params)[0]), ensure_ascii=False))
        else:
            _stream(llm, to_tokens(llm, prompt, arguments), params)
    return 0


def _converse(llm: LLM, params: SamplingParams, arguments: argparse.Namespace) -> None:
    """Turns of a user at the terminal and of the model, until the user's input ends."""
    if arguments.json:
        raise UsageError("--json answers one prompt; give it with --prompt, or leave --json out.")
    messages: list[Mapping[str, Any]] = [*system_messages(arguments)]
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = read_line()
        if not line:
            return
        if line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            messages.append({"role": "assistant", "content": _stream(llm, llm.chat_prompt(messages), params)})


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> str:
    """Print the pieces as they come, then the timings; returns the text."""
    start = first = time.perf_counter()
    text, tokens, reason = "", 0, None
    with progress_bar(len(prompt), "prompt tokens") as bar:
        for piece in llm.stream(prompt, params, watch=lambda done: bar.update(done - bar.n)):
            if tokens == 0:
                first = time.perf_counter()
                bar.close()
            shown = piece.text if llm.tokenizer is not None else "".join(f"{i} " for i in piece.token_ids)
            print(shown, end="", flush=True)
            text, tokens, reason = text + piece.text, tokens + len(piece.token_ids), piece.finish_reason
    print(flush=True)
    _remark(_timings(len(prompt), first - start, tokens, time.perf_counter() - first, reason))
    return text


def _timings(prompt: int, prefill: float, tokens: int, decode: float, reason: str | None) -> str:
    rate = f" ({(tokens - 1) / decode:.1f} tokens/s)" if tokens > 1 and decode > 0 else ""
    return (
        f"prompt of {prompt} tokens: first token after {prefill:.2f} s; "
        f"{tokens} tokens, the rest in {decode:.2f} s{rate}; ended by {reason}"
    )


def _remark(line: str) -> None:
    print(f"flashnext: {line}", file=sys.stderr)


def _facts(output: RequestOutput) -> dict[str, Any]:
    """The output as plain data."""
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_token_ids": output.prompt_token_ids,
        "logprobs": None if output.logprobs is None else [_logprobs(entry) for entry in output.logprobs],
        "drafts": {"proposed": output.drafts.proposed, "kept": output.drafts.kept, "steps": output.drafts.steps},
        "seconds": {"first_token": output.timings.first_token, "total": output.timings.finished},
    }


def _logprobs(entry: Mapping[int, Any]) -> Sequence[dict[str, Any]]:
    """The tokens at one place, the likeliest first."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [{"token_id": token, "logprob": value.logprob, "rank": value.rank} for token, value in ranked]
