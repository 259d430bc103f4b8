"""Every plugin through its whole life, led by a program that plays TensorRT; under AddressSanitizer and UBSan.

Creation from fields, output dtypes and shapes (by expressions), formats, configuration, workspace, clone, plan and
creation from it, contexts, shape changes, and steps on real data with the host execution of the kernels, compared with
the PyTorch reference. And faults in each of these.
"""

from __future__ import annotations

from pathlib import Path

import plugin_harness as harness
import pytest
from plugin_cases import KINDS, PluginCase, case_of

from flashnext.export.ops import schema
from flashnext.plugins.tensorrt import table
from flashnext.plugins.tensorrt.headers import Headers

FORMS = [(op.name, form.name) for op in schema.OPS for form in op.forms]
LINEAR = 0


@pytest.fixture(scope="session")
def program(headers: Headers) -> Path:
    return harness.build(headers)


def live(program: Path, case: PluginCase, folder: Path) -> dict[str, list[str]]:
    """Lead the plugin through its life and check its outputs; what was seen, by its first word."""
    run = harness.run(program, "life", case, folder, str(folder / "result"))
    assert run.returncode == 0, run.stderr
    outputs = (folder / "result").read_bytes()
    steps = range(len(case.steps))
    # While building, and in a context; and the first step in a second context.
    for step in (*steps, 0, *steps):
        outputs = case.check(step, outputs)
    assert outputs == b""
    seen: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        word, _, rest = line.partition(" ")
        seen.setdefault(word, []).append(rest)
    return seen


# FP8 forms in float32 differ from their neighbours in a dtype only.
LIVES = [
    pytest.param(op, form, dtype, marks=[pytest.mark.slow] if dtype == "float32" and "fp8" in form else [])
    for op, form in FORMS
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("op", "form", "dtype"), LIVES)
def test_life(op: str, form: str, dtype: str, program: Path, tmp_path: Path) -> None:
    case = case_of(op, form, dtype)
    seen = live(program, case, tmp_path)
    assert set(seen["accepts"]) == accepted(case)
    assert seen["copies"] == ["0"]
    assert seen["logged"] == ["0 "]
    assert seen["alias"] == [f"{i} -1" for i in range(len(case.aliases))]


def accepted(case: PluginCase) -> set[str]:
    """What each port may be, when the ports before it are as in the case."""
    op, found, bound = schema.op(case.op), set(), dict[str, str]()
    kinds = {str(dtype).removeprefix("torch."): kind for dtype, kind in KINDS.items()}
    combinations = [
        {"T": first, "E": second, "U": second}
        for first, others in table.COMBINATIONS[op.name].items()
        for second in others or (first,)
    ]
    for i, port in enumerate((*case.ports.inputs, *case.ports.outputs)):
        if port.dtype == "C":
            dtypes = {"float8_e4m3fn"}
        elif port.dtype not in op.type_variables:
            dtypes = {port.dtype}
        else:
            known = [c for c in combinations if all(c[v] == d for v, d in bound.items())]
            dtypes = {c[port.dtype] for c in known}
            bound[port.dtype] = case.dtypes[port.dtype]
        found |= {f"{i} {kinds[d]} {LINEAR}" for d in dtypes}
    return found


STATEFUL = [(op.name, form.name) for op in schema.OPS for form in op.forms if form.aliases and "fp8" not in form.name]


@pytest.mark.parametrize(("op", "form"), STATEFUL)
def test_states_that_are_not_in_place(op: str, form: str, program: Path, tmp_path: Path) -> None:
    """They are copied: the same results, and it is said."""
    case = case_of(op, form, "bfloat16", in_place=False)
    seen = live(program, case, tmp_path)
    states = len(case.ports.aliases)
    assert seen["copies"] == [str(states * (2 * len(case.steps) + 1))]
    count, _, last = seen["logged"][0].partition(" ")
    assert int(count) == 2  # once in each context
    assert "so each step copies the state. Bind both to one address" in last


@pytest.mark.parametrize(("op", "form"), STATEFUL)
def test_aliased_states(op: str, form: str, program: Path, tmp_path: Path) -> None:
    case = case_of(op, form, "bfloat16")
    case.fields.append(("aliased", 5, 1, b"\1\0\0\0"))
    seen = live(program, case, tmp_path)
    assert seen["alias"] == [f"{i} {alias}" for i, alias in enumerate(case.aliases)]


# --- faults -------------------------------------------------------------------------------------------

REASONS = {
    "create: no collection": "the creator was given no valid collection of fields",
    "create: form of type 8": "attribute 'form' must be CHARs, found field type 8",
    "types: all are HALF": "is HALF, for which there is no kernel here",
    "types: input 0 is BOOL": "is BOOL, for which there is no kernel here",
    "types: an input less": "inputs, found",
    "shapes: shape inputs": "this form has 0 shape inputs, found 1",
    "shapes: builder gives nothing after 0": "TensorRT's expression builder gave nothing",
    "formats: port -1": "there is no such port",
    "configure: input 0 in another format": "must have linear format",
    "configure: input 0 of negative size": "has the shape [",
    "configure: output of another dtype": "has another dtype than the inputs ask for",
    "plan: op_table overwritten": "Build the engine again, or load the library that it was built with",
    "plan: without op_version": "attributes are missing: op_version",
    "shape change: output 0 too large": "must have the shape",
    "run: input 0 is nowhere": "has no memory",
    "run: input 0 is not aligned": "does not start at a multiple of 16 bytes",
    "run: the launch fails": "run: the launch was made to fail",
    "memory: create ends after 0": "a plugin failed, and then its message",
}


def free_inputs(form: schema.Form) -> list[int]:
    """Inputs whose last dimension nothing else fixes: it may be anything that there is a kernel for."""
    dims = [d for p in form.inputs for d in p.shape if str(d).isidentifier()]
    return [i for i, p in enumerate(form.inputs) if dims.count(p.shape[-1]) == 1]


def allowed(case: PluginCase) -> set[str]:
    """What is no fault: other sizes that there is a kernel for, and no workspace where a step needs none."""
    free = [f"input {i}" for i in free_inputs(case.ports)]
    names = {f"{what} {which}" for which in free for what in ("shape change:", "run:")}
    names = {f"{name} {how}" for name in names for how in ("too small", "has no columns")}
    return names | ({"run: no workspace"} if case.op == "GatedDeltaNet" else set())


@pytest.mark.parametrize(
    ("op", "form"),
    [
        ("GatedResidual", "pending"),
        ("NgramInjection", "embed"),
        ("GatedDeltaNet", "default"),
        ("SparseAttention", "select_return"),
        ("SparseMoE", "nvfp4"),
    ],
)
def test_faults(op: str, form: str, program: Path, tmp_path: Path) -> None:
    """In every step of the life: an error code, a reason in the log, and a plugin that works afterwards."""
    case = case_of(op, form, "bfloat16")
    run = harness.run(program, "faults", case, tmp_path)
    assert run.returncode == 0, run.stderr
    outcomes = [line.split("\t") for line in run.stdout.splitlines()]
    found = {name: (outcome, log) for name, outcome, log in outcomes}
    accepted_ones = {name for name, (outcome, _) in found.items() if outcome != "refused"}
    assert accepted_ones <= allowed(case)
    for name in found.keys() - accepted_ones:
        assert found[name][1].startswith("flashnext: "), name
    for name, reason in REASONS.items():
        assert reason in found[name][1]
    steps = {name.partition(":")[0] for name in found}
    assert steps >= {"create", "types", "shapes", "formats", "configure", "plan", "shape change", "run", "memory"}
    assert len(found) > 150


@pytest.mark.parametrize("op", ["GatedDeltaNet", "SparseAttention"])
def test_what_kernels_refuse_is_refused_when_an_engine_is_built(op: str, program: Path, tmp_path: Path) -> None:
    """A size without a kernel, which fits the op table."""
    case = case_of(op, schema.op(op).forms[0].name, "bfloat16")
    name = {"GatedDeltaNet": "conv_weight", "SparseAttention": "inv_freq"}[op]
    at = [p.name for p in case.ports.inputs].index(name)
    for shapes in (case.least, case.most):
        shapes[at] = (*shapes[at][:-1], 9)
    run = harness.run(program, "life", case, tmp_path, str(tmp_path / "result"))
    assert run.returncode == 1
    reason = {"GatedDeltaNet": "must be 1 to 4 wide", "SparseAttention": "more rotary columns than head_dim"}[op]
    assert "configurePlugin" in run.stderr
    assert reason in run.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "form"), [(op.name, op.forms[-1].name) for op in schema.OPS] + [("SparseAttention", "select")]
)
def test_timing_on_memory_that_nobody_filled(op: str, form: str, dtype: str, program: Path, tmp_path: Path) -> None:
    """No access outside any buffer, whatever lengths, slots and values are."""
    run = harness.run(program, "timing", case_of(op, form, dtype), tmp_path, "6")
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("rounds 6\n")
