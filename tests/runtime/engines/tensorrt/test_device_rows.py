"""N-gram rows that the device finds itself: the host's rows bit by bit, the host's tokens, whoever may be late."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_engines
import numpy as np
import pytest
from cuda_on_host import CudaOnHost
from engine_folder import CHUNK, PLUGINS, Machine, library_info, write_engine
from onnxruntime_plans import module

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError, EngineError, FlashNextError, RequestError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest, NgramSpec
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.bench import Load
from flashnext.runtime.cli.main import main
from flashnext.runtime.engines.tensorrt import opening
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.device_rows import DeviceRows, Most
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.kernels import Kernels
from flashnext.runtime.engines.tensorrt.plan import Library
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.ngram_memory import TableMemory

TABLES = {"plain": None, "fp8": "fp8", "nvfp4": "fp8-bf16-mtp"}
"""Checkpoints by what their n-gram table is in."""
ON_DEVICE: dict[str, Any] = {"engine": "tensorrt", "ngram_table": "pinned", "ngram_gather": "device"}
PROMPTS: list[list[int]] = [list(range(40, 150)), [1, 2, 3], [7] * 20]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAFTED = {
    name: SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, draft_tokens=3, drafter=name)
    for name in ("mtp", "prompt-lookup")
}
MOST = Most(sequences=3, tokens=48)
Make = Callable[[str], Path]


@pytest.fixture
def make_bundle(once: Callable[[str, Callable[[Path], object]], Path], random_bundle: Path, tmp_path: Path) -> Make:
    """A bundle whose table is in that form, with an engine that has plugins; only the plain one has the draft layer."""

    def make(form: str) -> Path:
        def export(folder: Path) -> None:
            sizes = {"num_hidden_layers": 2, "ple_embed_dim": 256 if form == "nvfp4" else 64}
            checkpoint = write_random_checkpoint(folder / "checkpoint", sizes, quantization=TABLES[form], mtp=False)
            export_bundle(checkpoint, folder / "bundle", ExportOptions(capacity=256, slots=3))

        made = random_bundle if form == "plain" else once(f"device_rows_{form}", export) / "bundle"
        bundle = Path(shutil.copytree(made, tmp_path / form))
        write_engine(bundle, plugins=PLUGINS)
        return bundle

    return make


@pytest.fixture(autouse=True)
def kernels_of_the_engine(kernel_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with plugins find the host execution of the kernels in their library's place."""
    monkeypatch.setattr(opening, "find_plugins", lambda *_: library_info(kernel_library))


def tokens(llm: LLM, *many: SamplingParams) -> list[list[int]]:
    return [output.token_ids for params in many for output in llm.generate(PROMPTS, params)]


# --- the whole engine -------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "seed"), [("plain", None), ("plain", 1), ("fp8", None), ("nvfp4", 2)])
def test_the_tokens_are_those_of_the_hosts_rows(
    make_bundle: Make, machine: Machine, form: str, seed: int | None
) -> None:
    """Three sequences at once, prompts in chunks, with and without drafts, and prompts that begin as earlier ones."""
    bundle = make_bundle(form)
    wishes = [GREEDY, DRAFTED["mtp" if form == "plain" else "prompt-lookup"]]
    with LLM(bundle, threads=1, prefill_chunk=CHUNK) as llm:
        wanted = tokens(llm, *wishes)
    device = machine(seed)
    with LLM(bundle, engine="tensorrt") as llm:
        assert tokens(llm, *wishes) == wanted
    device = machine(seed)
    with LLM(bundle, **ON_DEVICE, prefix_cache_bytes=1 << 30) as llm:
        assert tokens(llm, *wishes) == wanted
        assert device.launches > 0
        (again,) = llm.generate([PROMPTS[0] + wanted[0]], GREEDY)
        assert again.cached_tokens >= len(PROMPTS[0])
        with LLM(bundle, threads=1, prefill_chunk=CHUNK) as reference:
            assert again.token_ids == reference.generate([PROMPTS[0] + wanted[0]], GREEDY)[0].token_ids
    assert device.blocks == 0  # the table is not pinned any more


def test_on_cuda_the_table_is_registered_and_let_go(
    make_bundle: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, host = make_bundle("plain"), machine()
    cuda = CudaOnHost(host)
    played = CudaDevice(cuda)
    monkeypatch.setattr(played, "queue", host.queue)  # the kernel runs on the stream of the played device
    monkeypatch.setattr(opening, "new_device", lambda: played)
    with LLM(bundle, **ON_DEVICE) as llm, LLM(bundle, threads=1) as reference:
        assert tokens(llm, GREEDY) == tokens(reference, GREEDY)
        assert cuda.called.count("cudaHostRegister") == 1
        assert "cudaHostUnregister" not in cuda.called
    assert cuda.called.count("cudaHostUnregister") == 1
    cuda.fail("cudaHostRegister", "cudaErrorMemoryAllocation")
    with pytest.raises(
        RequestError, match=r'CUDA cannot pin [\d,]+ bytes: cudaErrorMemory.*\. Take ngram_table = "huge"'
    ):
        LLM(bundle, **ON_DEVICE)


def test_a_device_that_has_failed_is_let_go(
    make_bundle: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call fails from then on; what is said of it is the first failure, and nothing stays behind for later."""
    bundle, host = make_bundle("plain"), machine()
    cuda = CudaOnHost(host)
    played = CudaDevice(cuda)
    monkeypatch.setattr(played, "queue", host.queue)
    monkeypatch.setattr(opening, "new_device", lambda: played)
    released = {"cudaHostUnregister", "cudaFreeHost", "cudaFree", "cudaGraphExecDestroy"}
    llm = LLM(bundle, **ON_DEVICE)
    llm.generate(PROMPTS, GREEDY)
    for function in {*cuda.called, *released}:
        cuda.fail(function, "cudaErrorIllegalAddress")
    cuda.called.clear()
    with pytest.raises(EngineError, match="cudaEventSynchronize failed: cudaErrorIllegalAddress"), llm:
        llm.generate(PROMPTS, GREEDY)
    assert released <= {*cuda.called}


def test_what_was_gathered_is_counted(make_bundle: Make, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle("plain")
    load = ["--prompt-length", "60", "--output-tokens", "4", "--repeats", "1", "--json"]
    found = []
    for options in (
        ["--threads", "1"],
        ["--ngram-table", "pinned", "--ngram-gather", "device", "--engine", "tensorrt"],
    ):
        machine()
        assert main(["bench", str(bundle), *load, *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["loads"][0]["ngram_rows"])
    host, device = found
    assert (host["gathered_by"], device["gathered_by"]) == ("host", "device")
    assert (host["rows"], host["bytes"]) == (device["rows"], device["bytes"])
    assert (device["hot"], device["in_memory"], device["chunks_fetched_ahead"]) == (0.0, 1.0, 0)
    assert device["decode_wait_ms"]["p50"] > 0


def test_the_stage_for_gpus_compares_both_ways(
    make_bundle: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `gpu_check --stage engines` measures once an engine is built, on the played GPU."""
    bundle = make_bundle("plain")
    short = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    load = Load(prompt_length=20, batch=2, output_tokens=3, repeats=1)
    for name, value in (("PROMPTS", ["a", "b"]), ("GREEDY", short), ("DRAFTED", short), ("LOADS", [load])):
        monkeypatch.setattr(gpu_engines, name, value)
    machine()
    wanted, _ = gpu_engines.texts(bundle, "onnxruntime")
    found = gpu_engines.measured(bundle, "tensorrt", [*wanted[:-1], []])
    assert found.keys() == {"host", "device"}
    for gather, facts in found.items():
        assert facts["differing_texts"] == 1
        assert [load["ngram_rows"]["gathered_by"] for load in facts["loads"]] == [gather]
    assert gpu_engines.wrong_rows(bundle, "tensorrt") == 0
    with monkeypatch.context() as changed:
        changed.setattr(gpu_engines, "SUM_ERROR", -1.0)
        assert gpu_engines.wrong_rows(bundle, "tensorrt") == 12
    write_engine(bundle, "tensorrt-rtx")
    assert gpu_engines.wrong_rows(bundle, "tensorrt-rtx") == 0
    assert gpu_engines.measured(bundle, "tensorrt-rtx", wanted).keys() == {"host"}


# --- the rows alone -----------------------------------------------------------------------------------


def open_rows(bundle: Path, kernel_library: Path, seed: int | None = None) -> tuple[Session, DeviceRows, HostRows, int]:
    """Both kinds of rows, and the event that the body would record."""
    device = HostDevice(seed)
    session = Session(device, Library("tensorrt", module), Kernels(device, kernel_library))
    manifest, consumed = Manifest.read(bundle), device.new_event()
    (spec,), checkpoint = manifest.ngrams, open_checkpoint(manifest)
    rows = DeviceRows.open(session, spec, checkpoint, manifest.dtype, MOST, consumed)
    return session, rows, HostRows.open(spec, checkpoint, manifest.dtype), consumed


def random_step(rng: np.random.Generator, spec: NgramSpec) -> tuple[Any, Any, Any]:
    """Ragged, with eos anywhere and sequences without a token."""
    batch = int(rng.integers(1, MOST.sequences + 1))
    steps = int(rng.integers(1, MOST.tokens // batch + 1))
    ids = rng.choice([*range(12), spec.eos], (batch, steps)).astype(np.int32)
    context = rng.choice([*range(12), spec.eos], (batch, len(spec.multipliers) - 1)).astype(np.int64)
    return ids, context, rng.integers(0, steps + 1, batch).astype(np.int32)


@pytest.mark.parametrize("form", TABLES)
def test_rows_are_the_hosts_bit_by_bit(make_bundle: Make, kernel_library: Path, form: str) -> None:
    session, rows, host, _ = open_rows(make_bundle(form), kernel_library)
    rng = np.random.default_rng(0)
    for _ in range(30):
        step = random_step(rng, host.spec)
        found, wanted = rows.submit(*step).wait(), host.submit(*step).wait()
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(found.copy().view(np.uint8), wanted.view(np.uint8))
    assert rows.counts().rows == host.counts().rows
    assert rows.counts().bytes == host.counts().bytes
    rows.close()
    host.close()
    session.close()
    assert session.device.blocks == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_no_step_waits_for_the_host_and_each_reads_its_own_rows(
    make_bundle: Make, kernel_library: Path, seed: int | None
) -> None:
    """A body follows each gather on the main stream; nobody waits until the end."""
    session, rows, host, consumed = open_rows(make_bundle("plain"), kernel_library, seed)
    device, rng = session.device, np.random.default_rng(1)
    read: list[bytes] = []
    wanted = []
    for _ in range(12):
        step = random_step(rng, host.spec)
        found = rows.submit(*step).wait()
        address, nbytes = found.address, found.nbytes
        device.queue(session.stream, lambda a=address, n=nbytes: read.append(ctypes.string_at(a, n)))  # type: ignore[misc]
        device.record(consumed, session.stream)
        wanted.append(host.submit(*step).wait().tobytes())
        for array in step:
            array[:] = 0  # the caller's arrays may change at once
    device.synchronize(session.stream)
    assert read == wanted
    rows.close()


@pytest.mark.parametrize(
    ("form", "parts", "touched"), [("plain", (320,), 320), ("fp8", (160,), 160), ("nvfp4", (80, 10), 136)]
)
def test_what_crosses_the_bus_for_a_token(
    kernel_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    parts: tuple[int, ...],
    touched: int,
) -> None:
    """At the official row size: some 32-byte sectors of the table, and the token with its context and length."""
    sizes = {"num_hidden_layers": 2, "ple_embed_dim": 2560}
    folder = write_random_checkpoint(tmp_path / form, sizes, quantization=TABLES[form], mtp=False, tokenizer=False)
    checkpoint, device = Checkpoint.open(folder), HostDevice()
    spec = checkpoint.ngram_spec(1)
    session = Session(device, Library("tensorrt", module), Kernels(device, kernel_library))
    rows = DeviceRows.open(session, spec, checkpoint, "bfloat16", Most(sequences=16, tokens=512), device.new_event())
    copied: list[int] = []
    monkeypatch.setattr(device, "copy", lambda target, source, nbytes, stream: copied.append(nbytes))
    rows.submit(np.ones((1, 1), np.int32), np.ones((1, 2), np.int64), np.ones(1, np.int32)).wait()
    assert copied == [256 + 256 + 4]  # each of the three begins where the device likes addresses to
    assert rows.counts().bytes == 16 * sum(parts)
    numbers = np.random.default_rng(0).integers(0, spec.rows, 10_000)
    sectors = sum(((numbers * size % 32 + size + 31) // 32).sum() for size in parts)
    assert round(32 * sectors / len(numbers)) == touched


def test_the_table_stays_pinned_until_the_device_is_done(make_bundle: Make, kernel_library: Path) -> None:
    session, rows, host, _ = open_rows(make_bundle("plain"), kernel_library)
    rows.submit(*random_step(np.random.default_rng(3), host.spec)).wait()
    rows.close()  # the played device refuses to unpin what queued work may read
    rows.close()  # twice does no harm
    session.close()
    assert session.device.blocks == 0  # type: ignore[attr-defined]


def test_rows_of_an_earlier_step_are_not_taken_for_those_of_this_one(make_bundle: Make, kernel_library: Path) -> None:
    _, rows, host, _ = open_rows(make_bundle("plain"), kernel_library)
    rng = np.random.default_rng(2)
    first = rows.submit(*random_step(rng, host.spec)).wait()
    rows.submit(*random_step(rng, host.spec)).wait()
    with pytest.raises(RuntimeError, match="earlier step"):
        first.copy()


def test_a_step_beyond_what_the_engine_was_built_for_is_refused(make_bundle: Make, kernel_library: Path) -> None:
    _, rows, _, _ = open_rows(make_bundle("plain"), kernel_library)
    context, lengths = np.zeros((4, 2), np.int64), np.ones(4, np.int32)
    for ids in (np.zeros((4, 1), np.int32), np.zeros((1, 49), np.int32)):
        with pytest.raises(
            EngineError, match=r"more n-gram rows than the engine was built for \(3 sequences, 48 tokens"
        ):
            rows.submit(ids, context[: len(ids)], lengths[: len(ids)]).wait()


def test_a_scale_that_is_none_is_refused_when_the_table_is_opened(
    make_bundle: Make, kernel_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device could not say so of the row that has it."""
    place = TableMemory.place

    def spoiled(memory: TableMemory, checkpoint: Checkpoint, names: Any) -> list[Any]:
        found = place(memory, checkpoint, names)
        for name, array in zip(names, found, strict=True):
            if name.endswith("weight_scale"):
                array.view(np.uint8)[-1, -1] = 0x7F
        return found

    bundle = make_bundle("nvfp4")
    monkeypatch.setattr(TableMemory, "place", spoiled)
    with pytest.raises(CheckpointError, match="holds NaN or a negative scale"):
        open_rows(bundle, kernel_library)


# --- refusals -----------------------------------------------------------------------------------------


def refusal(bundle: Path, **options: Any) -> str:
    with pytest.raises(FlashNextError) as caught:
        LLM(bundle, **{**ON_DEVICE, **options})
    return str(caught.value)


def test_where_no_device_can_gather_it_is_refused(
    make_bundle: Make, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make_bundle("plain")
    for engine in ("onnxruntime", "torch", "tensorrt-rtx"):
        said = f'ngram_gather = "device" is for the engine tensorrt; {engine} takes rows from the host. Leave it out.'
        assert refusal(bundle, engine=engine) == said
    for table in ("mapped", "locked", "huge"):
        assert refusal(bundle, ngram_table=table) == (
            f'ngram_gather = "device" reads a pinned table, and ngram_table = "{table}" is none: set ngram_table = '
            '"pinned" (--ngram-table pinned) too.'
        )
    assert refusal(bundle, ngram_gather="uva") == "ngram_gather = 'uva' must be one of host, device."
    assert main(["run", str(bundle), "--token-ids", "1", "--ngram-table", "pinned", "--ngram-gather", "device"]) == 2
    assert "is for the engine tensorrt; onnxruntime takes rows" in capsys.readouterr().err
    write_engine(bundle)
    device = machine()
    assert "takes a kernel of the plugin library, and the engine at" in refusal(bundle)
    assert device.blocks == 0


def test_a_table_that_the_kernel_does_not_take_is_refused_before_it_is_read(
    kernel_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel itself."""
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path / "f16", dtype="float16", layers=2))
    monkeypatch.setattr(TableMemory, "place", lambda *_: pytest.fail("it was read"))
    device = HostDevice()
    session = Session(device, Library("tensorrt", module), Kernels(device, kernel_library))
    with pytest.raises(EngineError) as caught:
        DeviceRows.open(session, checkpoint.ngram_spec(1), checkpoint, "float32", MOST, device.new_event())
    assert str(caught.value) == (
        'ngram_gather = "device" cannot take the n-gram table of layer 1 (F16; 16 heads of 4 columns, wanted in '
        "float32). The kernel ngram_rows cannot be launched: NgramRows: no kernel for these formats. Let the host "
        'gather (ngram_gather = "host").'
    )
    session.close()
    assert device.blocks == 0
