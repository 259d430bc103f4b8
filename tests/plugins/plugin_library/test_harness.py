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
    for step in range(len(case.steps)):
        # The first step is taken in two contexts.
        for _ in range(2 if step == 0 else 1):
            outputs = case.check(step, outputs)
    assert outputs == b""
    seen: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        word, _, rest = line.partition(" ")
        seen.setdefault(word, []).append(rest)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "form"), FORMS)
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
        if port.dtype == table.CODES:
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
    assert seen["copies"] == [str(states * (len(case.steps) + 1))]
    count, _, last = seen["logged"][0].partition(" ")
    assert int(count) == 2  # once in each context
    assert "so each step copies the state. Bind both to one address" in last


@pytest.mark.parametrize(("op", "form"), STATEFUL)
def test_aliased_states(op: str, form: str, program: Path, tmp_path: Path) -> None:
    case = case_of(op, form, "bfloat16")
    case.fields.append(("aliased", 5, 1, b"\1\0\0\0"))
    seen = live(program, case, tmp_path)
    assert seen["alias"] == [f"{i} {alias}" for i, alias in enumerate(case.aliases)]
