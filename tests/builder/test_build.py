"""`flashnext build`, from the command line to plans: real ones where TensorRT for RTX is installed; every refusal."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import py_compile
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from flashnext.builder import build_plan, memory, plan_text, proposal
from flashnext.builder.build import build_engine
from flashnext.builder.engine_manifest import EngineManifest, read_plan
from flashnext.builder.job import PlanJob
from flashnext.builder.plan_process import NO_RANDOMIZATION, build_in_process
from flashnext.builder.portable_graph import portable_form
from flashnext.builder.proposal import EngineOptions, propose
from flashnext.export.errors import BuildError, FlashNextError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.main import main

from .conftest import needs_rtx

RTX = ("--engine", "tensorrt-rtx", "--target", "120")
Answer = Callable[[str], None]


def proposed(bundle: Path, **options: Any) -> proposal.Proposal:
    options = {"overwrite": (bundle / "engines").exists(), **options}
    manifest = Manifest.read(bundle)
    settings = EngineOptions(**{"kind": "tensorrt-rtx", "targets": (120,), **options})
    return propose(bundle, manifest, Path(manifest.checkpoint.common_parent), settings)


@needs_rtx
def test_builds_an_engine_without_a_gpu(bundle_copy: Path, gpu: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(bundle_copy), *RTX, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    folder = bundle_copy / "engines/tensorrt-rtx-sm120"
    manifest = EngineManifest.read(folder)
    assert sorted(f.name for f in folder.iterdir()) == ["body.decode.plan", "body.prefill.plan", "engine.json"]
    assert (facts["golden_check"], facts["capabilities"]) == ("not run", [120])
    assert "no GPU" in manifest.golden_note
    manifest.check_bundle(bundle_copy, folder)
    graph = manifest.graphs["body"]
    steps = {"token_ids": (1, 1), "slots": (1,)}
    assert [graph.profile_for({**steps, "token_ids": s}).plan for s in ((2, 2), (1, 3))] == [  # type: ignore[union-attr]
        "body.decode.plan",
        "body.prefill.plan",
    ]
    assert set(graph.weights) == {w.name for w in Manifest.read(bundle_copy).weights}
    for plan, step in zip(graph.plans, ("decode", "prefill"), strict=True):
        estimated = next(p for p in proposed(bundle_copy).graphs["body"] if p.file == plan.file).estimate
        assert 100 << 20 < plan.peak_bytes < estimated.host
        listed = plan_text.listed_nodes(read_plan(folder, plan))
        form = portable_form((bundle_copy / "body.onnx").read_bytes(), 2, step)
        assert set(listed) == set(form.custom_nodes)


def may_fix_addresses() -> bool:
    """Whether a process may ask for addresses that are not randomized (containers may forbid it)."""
    code = f"import ctypes; l = ctypes.CDLL(None); print(l.personality({NO_RANDOMIZATION}), l.personality(0xffffffff))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return run.returncode == 0 and run.stdout.split()[-1:] == [str(NO_RANDOMIZATION)]


@needs_rtx
def test_the_same_graph_gives_the_same_bytes(tiny_bundle: Path, tmp_path: Path) -> None:
    if sys.platform != "linux" or not may_fix_addresses():
        pytest.skip("addresses of processes are randomized here, and a builder's bytes depend on them")
    compiled = Path(importlib.util.cache_from_source(build_plan.__file__))
    for name in ("a", "b"):  # once with modules that are compiled already: nothing of that may show in the bytes
        if name == "a":
            compiled.unlink(missing_ok=True)
        else:
            py_compile.compile(build_plan.__file__, str(compiled))
        (tmp_path / name).mkdir()
        (tmp_path / name / "graph.onnx").write_bytes(
            portable_form((tiny_bundle / "body.onnx").read_bytes(), 2, "decode").model
        )
        (plan,) = (p for p in proposed(tiny_bundle).graphs["body"] if "decode" in p.profiles)
        weights = Manifest.read(tiny_bundle).checkpoint.common_parent
        job = PlanJob("tensorrt-rtx", "graph.onnx", "body.plan", weights, tuple(plan.profiles.values()), (120,))
        build_in_process(job, tmp_path / name)
    assert (tmp_path / "a/body.plan").read_bytes() == (tmp_path / "b/body.plan").read_bytes()


def test_a_dry_run_tells_plans_profiles_and_memory(
    tiny_bundle: Path, gpu: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(tiny_bundle), *RTX, "--dry-run", "--max-batch", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    decode, prefill = facts["graphs"]["body"]
    assert decode["profiles"]["decode"]["token_ids"] == {"min": [1, 1], "opt": [1, 1], "max": [1, 2]}
    assert prefill["profiles"]["prefill"]["token_ids"] == {"min": [1, 3], "opt": [1, 32], "max": [1, 32]}
    assert decode["profiles"]["decode"]["logit_rows"]["max"] == [2]
    assert facts["host_bytes"] > 100 << 20
    assert facts["device_bytes"] > sum(p.stat().st_size for p in tiny_bundle.glob("*.onnx")) / 100
    assert main(["build", str(tiny_bundle), *RTX, "--dry-run"]) == 0
    assert "body.prefill.plan" in capsys.readouterr().out
    assert not (tiny_bundle / "engines").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "builds for the GPU at hand, and none answers"),
        (("--engine", "tensorrt-rtx"), "has to be told what to build for: --target 120"),
        (("--engine", "tensorrt-rtx", "--target", "90"), "does not build for sm_90"),
        (("--engine", "tensorrt-rtx", "--target", "120", "120"), "names one twice"),
        ((*RTX, "--plugins", "x.so"), "--plugins is about --engine tensorrt"),
        ((*RTX, "--timing-cache", "x"), "--timing-cache is about --engine tensorrt"),
        ((*RTX, "--hardware-compatible"), "--hardware-compatible is about --engine tensorrt"),
        ((*RTX, "--max-batch", "3"), "--max-batch 3 is not from 1 to the bundle's 2 slots"),
        ((*RTX, "--prefill-batch", "3"), "--prefill-batch 3 is not from 1 to the bundle's 2 slots"),
        ((*RTX, "--prefill-chunk", "33"), "--prefill-chunk 33 is not from 1 to the bundle's 32 tokens of capacity"),
        ((*RTX, "--out", "{bundle}"), "holds files that are not an engine"),
        ((*RTX, "--out", "{bundle}/manifest.json"), "is a file; name a folder"),
        ((*RTX, "--out", "{bundle}/new/engine"), "is no folder; make it first"),
        ((*RTX, "--out", "{bundle}/a/b/c"), "is no folder; make it first"),
        ((*RTX, "--out", "{bundle}/a/b/c", "--dry-run"), "is no folder; make it first"),
        ((*RTX, "--out", "{bundle}/manifest.json/c", "--dry-run"), "is no folder; make it first"),
        ((*RTX, "--workspace", "9" * 24), "expected a whole number from 0 to 1048576"),
        (("--engine", "tensorrt-rtx", "--target", "120", "{bundle}"), "BUNDLE goes before --target"),
        ((*RTX, "--checkpoint", "{bundle}"), "not the one|not a checkpoint|config.json"),
        (("--engine", "onnxruntime"), "invalid choice"),
    ],
)
def test_what_cannot_be_built_is_refused(
    bundle_copy: Path, gpu: Answer, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    assert main(["build", str(bundle_copy), *(w.format(bundle=bundle_copy) for w in words)]) == 2
    message = capsys.readouterr().err
    assert any(part in message for part in sentence.split("|")), message
    assert sorted(f.name for f in bundle_copy.iterdir()) == ["body.onnx", "generation_config.json", "manifest.json"]


def test_a_bundle_of_an_earlier_release_is_to_be_exported_again(bundle_copy: Path, gpu: Answer) -> None:
    """One whose graphs compute axes; before this was looked at, the parser of TensorRT said only what it missed."""
    graph = onnx.load(bundle_copy / "body.onnx", load_external_data=False)
    graph.graph.node.append(onnx.helper.make_node("ReduceMean", ["slots", "past_len"], ["mean"], name="mean"))
    content = graph.SerializeToString()
    (bundle_copy / "body.onnx").write_bytes(content)
    text = (bundle_copy / "manifest.json").read_text()
    old = Manifest.read(bundle_copy).graphs["body"].sha256
    (bundle_copy / "manifest.json").write_text(text.replace(old, hashlib.sha256(content).hexdigest()))
    with pytest.raises(FlashNextError, match=r"of an earlier release. Export the bundle again"):
        proposed(bundle_copy)


def test_tensorrt_refuses_what_does_not_fit_the_gpu(bundle_copy: Path, gpu: Answer) -> None:
    gpu("NVIDIA H200, 9.0, 140000")
    with pytest.raises(BuildError, match="which is sm_90, not for --target 120"):
        proposed(bundle_copy, kind="tensorrt")
    with pytest.raises(BuildError, match="--weights-as-inputs is about --engine tensorrt-rtx"):
        proposed(bundle_copy, kind="tensorrt", targets=(), weights_as_inputs=True)
    with pytest.raises(FlashNextError, match="flashnext plugins build"):
        proposed(bundle_copy, kind="tensorrt", targets=(), plugins=bundle_copy / "manifest.json")


def test_a_plugin_library_for_other_gpus_is_refused(
    bundle_copy: Path, gpu: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashnext.plugins.tensorrt import library

    gpu("NVIDIA H200, 9.0, 140000")
    other = library.LibraryInfo(Path("lib.so"), "ab", 1, "12", "10.14.1", ("120",), "")
    monkeypatch.setattr(library, "check", lambda path: other)
    with pytest.raises(BuildError, match="built for sm_120, and this GPU is sm_90"):
        proposed(bundle_copy, kind="tensorrt", targets=(), plugins="lib.so")


def test_one_plan_for_all_steps_with_tensorrt(bundle_copy: Path, gpu: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnext.plugins.tensorrt import library

    gpu("NVIDIA H200, 9.0, 140000")
    fitting = library.LibraryInfo(Path("lib.so"), "ab", 1, "12", "10.14.1", ("90",), "")
    monkeypatch.setattr(library, "check", lambda path: fitting)
    found = proposed(bundle_copy, kind="tensorrt", targets=(), plugins="lib.so")
    assert [(p.file, *p.profiles) for p in found.graphs["body"]] == [("body.plan", "decode", "prefill")]
    assert (found.plugins and found.plugins.sha256, found.capabilities) == ("ab", (90,))
    assert found.target == bundle_copy / "engines/tensorrt-sm90"
    gpu("NVIDIA H200, 9.0, 0")
    with pytest.raises(BuildError, match=r"NVIDIA H200 has 0\.0 GB free"):
        proposal.check_memory(proposed(bundle_copy, kind="tensorrt", targets=(), plugins="lib.so"))


def test_too_little_memory_is_told_before_the_build(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 100 << 20)
    with pytest.raises(BuildError, match=r"takes about .* GB of memory, and 0\.1 GB are free"):
        build_engine(proposed(bundle_copy))
    assert not (bundle_copy / "engines").exists()


def test_a_graph_that_was_exchanged_is_refused(bundle_copy: Path) -> None:
    graph = bundle_copy / "body.onnx"
    graph.write_bytes(graph.read_bytes() + b"\0")
    with pytest.raises(FlashNextError, match="damaged or exchanged"):
        proposed(bundle_copy)


def test_an_engine_is_replaced_only_on_demand(bundle_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/engine.json").write_text("{}")
    with pytest.raises(BuildError, match="add --overwrite"):
        proposed(bundle_copy, out=tmp_path / "engine")
    proposed(bundle_copy, out=tmp_path / "engine", overwrite=True)


# --- nothing half-written ---------------------------------------------------------------------------------------------


@needs_rtx
@pytest.mark.parametrize("differs", [False, True])
def test_the_golden_prompt_decides_where_a_gpu_runs_the_engine(bundle_copy: Path, gpu: Answer, differs: bool) -> None:
    gpu("NVIDIA RTX PRO 6000, 12.0, 90000")

    def golden(bundle: Path, folder: Path) -> str:
        assert EngineManifest.read(folder).golden_check == "not run"
        if differs:
            raise BuildError("The golden prompt differs.")
        return "12 outputs compared"

    found = proposed(bundle_copy, targets=())
    assert found.capabilities == (120,)
    if differs:
        with pytest.raises(BuildError, match="differs"):
            build_engine(found, golden=golden)
        assert not (bundle_copy / "engines").exists()
    else:
        assert build_engine(found, golden=golden).golden_check == "passed"
        assert EngineManifest.read(found.target).golden_note == "12 outputs compared"


def job(**changes: Any) -> PlanJob:
    return PlanJob(**{"kind": "tensorrt-rtx", "graph": "graph.onnx", "plan": "x.plan", "weights": ".", "profiles": (),
                      "capabilities": (120,), **changes})  # fmt: skip


@needs_rtx
def test_a_graph_that_cannot_be_parsed_says_why(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(b"not a graph")
    with pytest.raises(BuildError, match=r"cannot parse the graph of x\.plan"):
        build_in_process(job(), tmp_path)


def test_a_process_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"x\.plan ended with status 1\. .*FileNotFoundError|is not installed"):
        build_in_process(job(), tmp_path)


def test_an_interrupted_build_leaves_no_process_and_no_files(bundle_copy: Path) -> None:
    code = (
        "import sys, time, flashnext.builder.build as b\n"
        "from flashnext.runtime.cli.main import main\n"
        "def wait(job, folder, progress):\n"
        "    import subprocess, flashnext.builder.plan_process as p\n"
        "    with open(folder / 'log', 'wb') as log, p._child(folder, log) as child:\n"
        "        print(child.pid, flush=True); time.sleep(60)\n"
        "b.build_in_process = wait\n"
        f"sys.exit(main({['build', str(bundle_copy), *RTX]!r}))"
    )
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)
    assert sorted(f.name for f in bundle_copy.iterdir()) == ["body.onnx", "generation_config.json", "manifest.json"]


def _alive(pid: int) -> bool:
    return ctypes.CDLL(None).kill(pid, 0) == 0
