"""What the engine calls of TensorRT exists, with these parameters, in the bindings that can be installed without a GPU.

The classes of onnxruntime_plans.py are the only TensorRT that the engine meets in the tests, so whatever it calls is a
method of theirs, and these are held to the real ones: TensorRT 11.4's runtime (`tensorrt-lean`; it has no inspector)
and TensorRT for RTX. The full TensorRT's bindings are walked on empty libraries (published_walk.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime_plans as played
import pytest

from flashnext.runtime.engines.tensorrt.log import Log, logger_for
from flashnext.runtime.engines.tensorrt.plan import DTYPES

MODULES = ("tensorrt_lean_bindings", "tensorrt_rtx_bindings")
CLASSES = ("Runtime", "ICudaEngine", "IExecutionContext", "EngineInspector", "IPluginRegistry", "ILogger")
ENUMERATIONS = (
    "TensorIOMode",
    "ExecutionContextAllocationStrategy",
    "LayerInformationFormat",
    "DataType",
    "TensorLocation",
)
ONLY_IN_FULL = {"tensorrt_lean_bindings": ("EngineInspector",)}


@pytest.fixture(params=MODULES)
def bindings(request: pytest.FixtureRequest) -> ModuleType:
    return pytest.importorskip(request.param)  # type: ignore[no-any-return]


def overloads(function: Any) -> list[list[str]]:
    """Names of the parameters of every overload, as pybind11 writes them into the documentation, without `self`."""
    lines = re.findall(rf"(?:^|\d+\. ){function.__name__}\((.*)\) ->", function.__doc__ or "", re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+):", line)[1:] for line in lines if "*args" not in line]


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_is_one_of_the_real_class(bindings: ModuleType, name: str) -> None:
    if name in ONLY_IN_FULL.get(bindings.__name__, ()):
        pytest.skip("not in the runtime without a builder")
    real, ours = getattr(bindings, name), getattr(played, name)
    checked = 0
    for method, function in vars(ours).items():
        if method in ("plan", "find") or (method.startswith("_") and method != "__init__"):
            continue
        assert hasattr(real, method), f"{name}.{method}"
        if isinstance(function, property):
            assert isinstance(getattr(real, method), property)
        elif inspect.isfunction(function) and (method != "__init__" or name == "Runtime"):
            parameters = list(inspect.signature(function).parameters)[1:]
            assert parameters in overloads(getattr(real, method)), f"{name}.{method}{parameters}"
            checked += 1
    assert checked


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_every_value_is_one_of_the_real_enumeration(bindings: ModuleType, name: str) -> None:
    ours: type[IntEnum] = getattr(played, name)
    real = getattr(bindings, name)
    assert {member.name for member in ours} <= {*real.__members__}
    if name == "DataType":
        assert set(DTYPES) <= {*real.__members__}


def test_the_registry_and_the_version_are_where_they_are_looked_for(bindings: ModuleType) -> None:
    assert callable(bindings.get_plugin_registry)
    assert re.fullmatch(r"\d+(\.\d+)+", bindings.__version__)


def test_lines_of_the_real_loggers_class_are_kept(bindings: ModuleType) -> None:
    log = Log()
    logger = logger_for(bindings, log)
    assert isinstance(logger, bindings.ILogger)
    mark = log.mark()
    logger.log(bindings.ILogger.Severity.INFO, "Loaded engine size: 3 MiB")
    logger.log(bindings.ILogger.Severity.WARNING, "CUDA lazy loading is not enabled.")
    assert log.since(mark) == ["CUDA lazy loading is not enabled."]
    for number in range(6):
        logger.log(bindings.ILogger.Severity.ERROR, f"[runtime.cpp::{number}] Error Code {number}\n")
    assert log.since(mark) == [f"[runtime.cpp::{n}] Error Code {n}" for n in range(2, 6)]
    assert log.since(log.mark()) == []
    error = log.error("TensorRT cannot load body.plan", mark, "Build the engine again.")
    assert str(error).endswith("; [runtime.cpp::5] Error Code 5. Build the engine again.")
    assert str(log.error("It failed", log.mark())) == "It failed. TensorRT says: it gave no reason."


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_bindings") is None, reason="needs tensorrt-bindings")
def test_every_call_is_one_that_tensorrt_publishes() -> None:
    """In a process of its own: these bindings stand on empty libraries."""
    script = Path(__file__).with_name("published_walk.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    version, *calls = run.stdout.split()
    assert version.startswith("11.")
    assert {
        "Runtime.__init__",
        "Runtime.deserialize_cuda_engine",
        "ICudaEngine.num_io_tensors",
        "ICudaEngine.get_tensor_location",
        "ICudaEngine.create_execution_context",
        "EngineInspector.get_engine_information",
        "IExecutionContext.set_optimization_profile_async",
        "IExecutionContext.set_device_memory",
        "IExecutionContext.set_input_shape",
        "IExecutionContext.set_tensor_address",
        "IExecutionContext.execute_async_v3",
    } <= {*calls}
