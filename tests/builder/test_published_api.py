"""Every call into TensorRT 11 is one that its bindings publish; nothing but a GPU machine can run them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext.builder.engine_manifest import Range
from flashnext.builder.job import PlanJob

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorrt_bindings") is None, reason="needs tensorrt-bindings")
SCRIPT = Path(__file__).with_name("published_api.py")
JOB = PlanJob(
    kind="tensorrt",
    graph="graph.onnx",
    plan="body.plan",
    weights="weights",
    profiles=({"x": Range((1, 1), (1, 1), (4, 8))}, {"x": Range((1, 9), (1, 64), (1, 64))}),
    plugins="libflashnext_plugins.so",
    timing_cache="timings.bin",
    hardware_compatible=True,
    version_compatible=True,
    workspace=1 << 30,
)
USED = {
    "Builder.__init__",
    "Builder.get_plugin_registry",
    "IPluginRegistry.load_library",
    "Builder.create_network",
    "OnnxParser.__init__",
    "OnnxParser.parse",
    "Builder.create_builder_config",
    "IBuilderConfig.clear_flag",
    "IBuilderConfig.set_flag",
    "IBuilderConfig.set_memory_pool_limit",
    "IBuilderConfig.profiling_verbosity=",
    "IBuilderConfig.hardware_compatibility_level=",
    "IBuilderConfig.create_timing_cache",
    "IBuilderConfig.set_timing_cache",
    "Builder.create_optimization_profile",
    "IOptimizationProfile.set_shape",
    "IBuilderConfig.add_optimization_profile",
    "IBuilderConfig.progress_monitor=",
    "Builder.build_serialized_network",
    "IBuilderConfig.get_timing_cache",
    "ITimingCache.serialize",
}


def walk(job: PlanJob, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Run build_plan against the published signatures; `before` are changes of the sources that the walk sees."""
    (folder / "graph.onnx").write_bytes(b"a graph")
    code = "; ".join([f"import sys, runpy; sys.argv[1:] = [{job.to_json()!r}]", *before])
    command = [sys.executable, "-c", f"{code}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=dict(os.environ))


def test_every_call_is_published(tmp_path: Path) -> None:
    run = walk(JOB, tmp_path)
    assert run.returncode == 0, run.stderr
    version, *calls = run.stdout.split("\n")
    assert version.startswith("11.")
    assert set(calls) >= USED
    assert calls.count("IOptimizationProfile.set_shape") == 2
    assert (tmp_path / "timings.bin").read_bytes() == b"plan"


def test_a_plan_without_options_needs_fewer_calls(tmp_path: Path) -> None:
    plain = dataclasses.replace(
        JOB, plugins="", timing_cache="", hardware_compatible=False, version_compatible=False, workspace=0
    )
    run = walk(plain, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "IBuilderConfig.set_timing_cache" not in run.stdout


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("config.set_flag(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)", "flag must be"),
        ("config.set_flag(flags=trt.BuilderFlag.TF32)", "missing a required argument: 'flag'"),
        ("config.set_flag(trt.BuilderFlag.FP16)", "FP16"),
        ("config.set_builder_optimization_level(3)", "set_builder_optimization_level"),
        ("config.num_optimization_profiles = 2", "cannot be set"),
        ("config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, '1G')", "pool_size must be"),
    ],
)
def test_a_call_that_is_not_published_fails(tmp_path: Path, wrong: str, fault: str) -> None:
    change = f"apis.Api.configure = lambda self, config, job: exec({wrong!r}, dict(trt=self.trt, config=config))"
    run = walk(JOB, tmp_path, "import flashnext.builder.apis as apis", change)
    assert run.returncode != 0
    assert fault in run.stderr
