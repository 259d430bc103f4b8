"""The whole runtime on the small random checkpoint: generating, streaming, chatting, scoring, failing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.errors import RequestError
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.sampler import uniform

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS: list[str | list[int]] = ["When the morning came", [1, 2, 3], [7], list(range(40, 110)), "x = [1, 2]"]
TEXT = [int(i) for i in np.random.default_rng(5).integers(0, 500, 90)]


@pytest.fixture(scope="module")
def llm(random_bundle: Path) -> Iterator[LLM]:
    with LLM(random_bundle, threads=1, prefill_chunk=32) as opened:
        yield opened


def test_several_prompts_at_once_give_what_each_gives_alone(llm: LLM) -> None:
    """Five prompts, three slots: chunks, waiting, reuse of slots."""
    together = llm.generate(PROMPTS, GREEDY)
    assert [o.prompt for o in together] == [p if isinstance(p, str) else None for p in PROMPTS]
    for output, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = llm.generate([prompt], GREEDY)
        assert output.token_ids == alone.token_ids
        assert output.finish_reason == "length"
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(output.token_ids).startswith(output.text)
        assert 0 <= output.timings.admitted <= output.timings.first_token <= output.timings.finished
        assert output.timings.tokens == 12


def test_greedy_text_follows_the_scores(llm: LLM) -> None:
    (output,) = llm.generate([TEXT[:50]], GREEDY)
    (logits,) = llm.score([TEXT[:50] + output.token_ids])
    assert logits[49:-1].argmax(axis=1).tolist() == output.token_ids


def test_logprobs_are_those_of_the_scores(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, top_k=3, seed=2, logprobs=4, ignore_eos=True)
    (output,) = llm.generate([TEXT[:20]], params)
    assert output.logprobs is not None
    (logits,) = llm.score([TEXT[:20] + output.token_ids])
    for row, token, found in zip(logits[19:], output.token_ids, output.logprobs, strict=False):
        wide = row.astype(np.float64)
        expected = wide - np.log(np.exp(wide).sum())
        assert 4 <= len(found) <= 5
        assert found[token].rank <= 3
        for candidate, value in found.items():
            assert value.logprob == pytest.approx(expected[candidate], abs=1e-4)


def test_equal_seeds_give_equal_texts_whatever_else_runs(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
    other = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
    (alone,) = llm.generate(["The rain"], seeded)
    crowd = llm.generate([[9, 8, 7], "The rain", TEXT[:70]], [other, seeded, other])
    assert crowd[1].token_ids == alone.token_ids
    assert llm.generate(["The rain"], SamplingParams(max_tokens=12, temperature=1.0, seed=12))[0].token_ids != (
        alone.token_ids
    )


def test_stream_gives_the_text_of_generate_piece_by_piece(llm: LLM) -> None:
    (whole,) = llm.generate(["The rain"], GREEDY)
    pieces = list(llm.stream("The rain", GREEDY))
    assert "".join(str(p) for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces] == [None] * 11 + ["length"]


def test_a_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    (whole,) = llm.generate(["The rain"], GREEDY)
    stop = whole.text[4:7]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=["never said", stop])
    (output,) = llm.generate(["The rain"], params)
    assert output.finish_reason == "stop"
    assert output.text == whole.text[: whole.text.index(stop)]
    assert "".join(p.text for p in llm.stream("The rain", params)) == output.text


def test_a_chat_ends_with_its_turn(llm: LLM) -> None:
    """The configuration's eos separates documents; a turn ends with another token, which the tokenizer names."""
    assert llm.manifest.config.eos_token_id == (random_tokenizer.END_OF_TEXT,)
    assert random_tokenizer.IM_END in llm.manifest.stop_token_ids
    messages = [{"role": "user", "content": "Where are you going?"}]
    # So hot that all tokens are equally likely: the seed alone decides what is said, and when the turn ends.
    hot = {"temperature": 1e6, "top_k": 0, "top_p": 1.0, "max_tokens": 20}
    seed, place = _seed_that_says(random_tokenizer.IM_END, llm.manifest.config.vocab_size)
    (free,) = llm.chat(messages, SamplingParams(seed=seed, ignore_eos=True, **hot))
    (output,) = llm.chat(messages, SamplingParams(seed=seed, **hot))
    assert len(free.token_ids) == 20
    assert output.token_ids == free.token_ids[: place + 1]
    assert output.token_ids[-1] == random_tokenizer.IM_END
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text
    assert output.prompt_token_ids.count(random_tokenizer.IM_START) == 2


def _seed_that_says(token: int, vocabulary: int) -> tuple[int, int]:
    """A seed whose draws over equal weights say `token` at some place from 5 to 15, and that place."""
    for seed in range(10_000):
        said = [int(uniform(seed, place) * vocabulary) for place in range(15)]
        if token in said[5:] and not {token, random_tokenizer.END_OF_TEXT} & set(said[:5]):
            return seed, said.index(token)
    raise AssertionError("no such seed")


def test_scores_do_not_depend_on_chunks_or_on_what_the_slot_held(random_bundle: Path, llm: LLM) -> None:
    (expected,) = llm.score([TEXT])
    (draft,) = llm.score_draft([TEXT])
    assert expected.shape == (90, 512)
    assert draft.shape == (89, 512)
    for chunk in (3, 9, 64):
        with LLM(random_bundle, threads=1, prefill_chunk=chunk) as other:
            (fresh,), (fresh_draft,) = other.score([TEXT]), other.score_draft([TEXT])
            other.generate(PROMPTS[:3], SamplingParams(max_tokens=2))
            (used,), (used_draft,) = other.score([TEXT]), other.score_draft([TEXT])
        assert fresh.tobytes() == used.tobytes()
        assert fresh_draft.tobytes() == used_draft.tobytes()
        assert np.abs(fresh - expected).max() <= 2e-5 * expected.std()
        assert np.abs(fresh_draft - draft).max() <= 2e-5 * draft.std()


def test_score_of_one_token(llm: LLM) -> None:
    (one,), (none,) = llm.score([[5]]), llm.score_draft([[5]])
    assert (one.shape, none.shape) == ((1, 512), (0, 512))


def test_a_stream_left_open_keeps_its_slot_until_it_is_closed(llm: LLM) -> None:
    streams = [llm.stream([i + 1], GREEDY) for i in range(3)]
    for stream in streams:
        next(stream)
    with pytest.raises(RequestError, match="All slots are in use"):
        llm.score([[1]])
    (output,) = llm.generate(["The rain"], GREEDY)  # waits until the streams have ended
    assert len(output.token_ids) == 12
    streams[0].close()
    assert sum(len(p.token_ids) for p in streams[1]) == 11
    assert len(llm.score([[1], [2]])) == 2


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("", "The prompt is empty"),
        ([[]], "The prompt is empty"),
        (["fine", [512]], "512; token ids"),
        ([[1] * 257], "257 tokens and a slot of this bundle holds 256"),
        ([1, 2, 3], "belongs in a list of prompts"),
        (5, "must be text or a list of prompts"),
        ([None], "must be text or a list of token ids"),
        ([b"bytes"], "must be text or a list of token ids"),
        (["\udcff"], "not valid UTF-8"),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompts: object, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_parameters_and_life_cycle(random_bundle: Path, llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY])
    for params in ({"temperature": 0}, [None, None], "hot", 5):
        with pytest.raises(RequestError, match=r"sampling parameters|Sampling parameters must be"):
            llm.generate(["a", "b"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="Sampling parameters must be"):
        llm.stream("a", "hot")  # type: ignore[arg-type]
    for messages in ([], None, "hi", {"role": "user"}):
        with pytest.raises(RequestError, match="A chat needs a list of messages"):
            llm.chat(messages)  # type: ignore[arg-type]
    for sequences in (5, None, "abc"):
        with pytest.raises(RequestError, match="Scores need a list of sequences"):
            llm.score(sequences)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="watch must be a function of one number, or None; found 'x'"):
        llm.stream("a", watch="x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="Every token of the vocabulary is a stop token"):
        llm.generate("a", SamplingParams(min_tokens=1, stop_token_ids=range(512)))
    for option in (
        {"threads": 0},
        {"threads": "2"},
        {"threads": 1025},
        {"prefill_chunk": 8.5},
        {"prefill_chunk": None},
        {"max_batch": "1"},
        {"max_waiting": True},
        {"ngram_cache_bytes": False},
        {"ngram_cache_bytes": 0.0},
        {"prefix_cache_bytes": False},
    ):
        with pytest.raises(RequestError, match=f"{next(iter(option))} = .* must be a whole number"):
            LLM(random_bundle, **option)  # type: ignore[arg-type]
    closed = LLM(random_bundle, threads=1)
    closed.close()
    closed.close()
    for call in (lambda: closed.generate("a"), lambda: closed.score([[1]]), lambda: closed.stream("a")):
        with pytest.raises(RequestError, match="has been closed"):
            call()


def test_a_stream_of_a_closed_llm_says_so(random_bundle: Path) -> None:
    llm = LLM(random_bundle, threads=1)
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(RequestError, match="has been closed"):
        next(stream)


def test_a_stream_that_begins_after_the_end_says_so(random_bundle: Path) -> None:
    closed = LLM(random_bundle, threads=1)
    late = closed.stream("a")
    closed.close()
    with pytest.raises(RequestError, match="has been closed"):
        next(late)


@pytest.mark.parametrize("value", ["4,2", "", "all", "-1", "9999", "99999999999"])
def test_thread_settings_of_the_environment_that_are_no_number(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with LLM(random_bundle) as llm:
        assert len(llm.generate([[1]], GREEDY)[0].token_ids) == 12


def test_token_ids_may_be_numpy(llm: LLM) -> None:
    by_array = llm.generate([np.array([1, 2, 3])], GREEDY)  # type: ignore[list-item]
    assert by_array[0].token_ids == llm.generate([[1, 2, 3]], GREEDY)[0].token_ids


def test_torch_is_not_imported(random_bundle: Path) -> None:
    code = (
        "import sys; from flashnext.runtime import LLM, SamplingParams; "
        f"LLM({str(random_bundle)!r}, threads=1).generate('a', SamplingParams(max_tokens=2)); "
        "print(*{'torch', 'onnx', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == []
