"""The whole TensorRT engine on a played GPU: the same tokens as the onnxruntime engine, whoever may be late."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_folder import CHUNK, Machine, write_engine
from onnxruntime_plans import module

from flashnext.export.errors import EngineError
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.engines.tensorrt.arrays import DeviceArray
from flashnext.runtime.engines.tensorrt.plan import Context
from flashnext.runtime.hand_over import join
from flashnext.runtime.model_runner import StepBatch, StepOutput
from flashnext.runtime.outputs import RequestOutput

PROMPTS: list[list[int]] = [list(range(40, 150)), [1, 2, 3], [7] * 20]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAFTED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, draft_tokens=3)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def reference(random_bundle: Path) -> Iterator[LLM]:
    with LLM(random_bundle, threads=1, prefill_chunk=CHUNK) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(reference: LLM) -> list[list[int]]:
    """What the onnxruntime engine says."""
    return tokens(reference.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(("kind", "seed"), [("tensorrt", None), ("tensorrt", 1), ("tensorrt-rtx", 2)])
def test_the_tokens_are_those_of_onnxruntime(
    kind: str, seed: int | None, bundle: Path, machine: Machine, reference: LLM, wanted: list[list[int]]
) -> None:
    """Three sequences in slots of their own, prompts in chunks, decoding with and without drafts of the draft layer,
    states in place and in turn; work of the device as late as possible, and at moments that a seed chooses."""
    write_engine(bundle, kind)
    device = machine(seed)
    with LLM(bundle, engine=kind) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        drafted = llm.generate(PROMPTS, DRAFTED)
        assert tokens(drafted) == wanted
        assert [o.drafts for o in drafted] == [o.drafts for o in reference.generate(PROMPTS, DRAFTED)]
        assert device.launches > 0


def test_scores_are_those_of_onnxruntime(engine: Path, machine: Machine, reference: LLM) -> None:
    machine()
    text = [list(range(100, 160))]
    with LLM(engine, engine="tensorrt") as llm:
        np.testing.assert_array_equal(llm.score(text)[0], reference.score(text)[0])
        np.testing.assert_array_equal(llm.score_draft(text)[0], reference.score_draft(text)[0])


def test_restored_states_are_those_that_were_saved(engine: Path, machine: Machine, wanted: list[list[int]]) -> None:
    """The prefix cache reads and writes a slot's states on the device."""
    machine()
    with LLM(engine, engine="tensorrt", prefix_cache_bytes=1 << 30) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        llm.generate(PROMPTS[1:], GREEDY)  # uses other slots, and the first one again
        (again,) = llm.generate([PROMPTS[0] + wanted[0]], GREEDY)
        assert again.cached_tokens > len(PROMPTS[0])
    with LLM(engine, engine="onnxruntime", threads=1, prefill_chunk=CHUNK) as llm:
        assert tokens([again]) == tokens(llm.generate([PROMPTS[0] + wanted[0]], GREEDY))


def test_experts_may_stay_in_host_memory(engine: Path, machine: Machine, wanted: list[list[int]]) -> None:
    free = []
    for place in ("device", "host"):
        device = machine()
        with LLM(engine, engine="tensorrt", expert_memory=place) as llm:
            free.append(device.free_bytes())
            assert tokens(llm.generate(PROMPTS[1:2], GREEDY)) == wanted[1:2]
    experts = sum(w.nbytes for w in _expert_weights(engine))
    assert free[1] - free[0] == experts


def _expert_weights(bundle: Path) -> list[np.ndarray]:
    from flashnext.export.graphs.manifest import Manifest
    from flashnext.runtime.model_runner import open_checkpoint
    from flashnext.runtime.weights import load_weights

    manifest = Manifest.read(bundle)
    return [w for name, w in load_weights(manifest, open_checkpoint(manifest)).items() if ".experts." in name]


def test_all_memory_is_given_back(engine: Path, machine: Machine) -> None:
    device = machine()
    free = device.free_bytes()
    llm = LLM(engine, engine="tensorrt")
    output = llm.generate([[5, 6]], GREEDY)[0]
    assert device.free_bytes() < free
    llm.close()
    llm.close()
    gc.collect()
    assert device.free_bytes() == free
    assert device.blocks == 0
    assert len(output.token_ids) == 8


def test_a_graph_that_cannot_be_captured_is_said_once(
    engine: Path,
    machine: Machine,
    wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = machine()

    def fails(stream: int, queue: object) -> int:
        raise EngineError("cudaStreamEndCapture failed: cudaErrorStreamCaptureInvalidated.")

    monkeypatch.setattr(device, "capture", fails)
    with LLM(engine, engine="tensorrt") as llm:
        assert tokens(llm.generate(PROMPTS[1:2], GREEDY)) == wanted[1:2]
    assert device.launches == 0
    (said,) = [r.getMessage() for r in caplog.records if "body.onnx" in r.getMessage()]
    assert said == (
        "Steps of body.onnx run without CUDA graphs: cudaStreamEndCapture failed: cudaErrorStreamCaptureInvalidated."
    )


def test_nothing_is_captured_while_kernels_are_compiled(
    engine: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT for RTX specializes kernels in the background and says when it is done."""
    device = machine()
    monkeypatch.setattr(Context, "capturable", lambda context, stream: False)
    with LLM(engine, engine="tensorrt") as llm:
        llm.generate(PROMPTS[1:2], GREEDY)
    assert device.launches == 0


def test_a_failing_step_says_what_tensorrt_says(bundle: Path, machine: Machine) -> None:
    write_engine(bundle, plan={"fails": "IExecutionContext::enqueueV3: Error Code 1: Cask (no kernel image)"})
    machine()
    with (
        LLM(bundle, engine="tensorrt") as llm,
        pytest.raises(EngineError, match=r"TensorRT refuses a step \(.*plan, profile 0\).*no kernel image\)\."),
    ):
        llm.generate([[1, 2]], GREEDY)


def test_larger_steps_than_the_engine_was_built_for_are_refused(bundle: Path, machine: Machine) -> None:
    write_engine(bundle, sequences=2)
    machine()
    with pytest.raises(EngineError, match="3 sequences are to run at once, and the engine was built for 2"):
        LLM(bundle, engine="tensorrt", max_batch=3)
    machine()
    with LLM(bundle, engine="tensorrt", prefill_chunk=500) as llm:
        assert len(llm.generate([[1] * 100, [2], [3]], GREEDY)) == 3  # in chunks of 48, two at a time
        head = llm._runner._engines["head"]  # type: ignore[union-attr]
        feeds = {t.name: np.zeros((3, 1)[: len(t.shape)], np.int32) for t in head.spec.inputs if t.role == "step"}
        with pytest.raises(
            EngineError, match=r"no decode profile for a step of 3 sequences, 1 tokens each; it takes 1 to"
        ):
            head.run(feeds)


def test_results_of_an_earlier_step_are_not_taken_for_those_of_this_one(engine: Path, machine: Machine) -> None:
    machine()
    with LLM(engine, engine="tensorrt") as llm:
        runner = llm._runner
        assert runner is not None
        first = _step(runner, 5)
        assert isinstance(first.hidden, DeviceArray)
        kept = first.hidden.copy()
        second = _step(runner, 6)
        with pytest.raises(RuntimeError, match="earlier step"):
            first.hidden.copy()
        assert not np.array_equal(kept, second.hidden.copy())
        assert not np.array_equal(first.logits, second.logits)  # results on the host stay what they were


def _step(runner: Any, token: int) -> StepOutput:
    one = np.ones(1, np.int32)
    context = np.zeros((1, runner.manifest.config.ngram_size - 1), np.int64)
    return runner.step(StepBatch(np.array([[token]], np.int32), one * 0, one * 0, one * 0, one, context, one * 0))


def test_rows_of_the_draft_layer_are_joined_on_the_device(engine: Path, machine: Machine, reference: LLM) -> None:
    """Rows of different lengths, out of order, from the body and then from the layer itself."""
    machine(5)
    with LLM(engine, engine="tensorrt") as llm:
        found, wanted = (_drafts(x._runner) for x in (llm, reference))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _drafts(runner: Any) -> list[Any]:
    """Results of the draft layer's two graphs after a step of two sequences."""
    slots, past, new = (np.array(x, np.int32) for x in ([2, 0], [0, 0], [3, 5]))
    ids = np.arange(10, dtype=np.int32).reshape(2, 5) + 40
    context = np.zeros((2, runner.manifest.config.ngram_size - 1), np.int64)
    hidden = runner.step(StepBatch(ids, slots, past, past, new, context, np.array([2, 9], np.int32))).hidden
    rows = join([hidden[1, :5], hidden[0, :3]], 5)
    lengths, ends = new[::-1].copy(), np.array([4, 7], np.int32)
    logits, states, blocks = runner.mtp_step(ids + 1, rows, slots[::-1].copy(), past, lengths, ends)
    again = join([states[1, 2:3], states[0, 4:5]], 1)
    order = np.array([1, 0])
    one = np.ones(2, np.int32)
    drafted, after = runner.mtp_draft(
        ids[:, :1], again, slots, lengths[order], one, blocks[order], lengths[order], np.arange(2, dtype=np.int32)
    )
    return [logits, blocks, drafted, np.asarray(after)]


def test_the_engine_runs_plans_with_the_calls_that_were_counted(engine: Path, machine: Machine) -> None:
    """A decode step of a captured shape makes no call into TensorRT at all."""
    device = machine()
    with LLM(engine, engine="tensorrt") as llm:
        llm.generate([[1, 2]], GREEDY)
        before = module.enqueued, device.launches
        llm.generate([[1, 2]], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        steps = device.launches - before[1]
    assert steps >= 2 * 18  # head and body
    assert module.enqueued - before[0] <= 8
