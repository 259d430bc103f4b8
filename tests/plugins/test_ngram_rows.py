"""N-gram rows found by the device: the very rows that the host finds, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits
from ngram_rows_case import ngram_rows_case, pairs

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16, E4M3, NVFP4 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8
FORMATS = [(table, out) for table in (F32, BF16, E4M3, NVFP4) for out in (BF16, F32)]


def check(kernels: HostKernels, **settings: object) -> None:
    case = ngram_rows_case(**settings)  # type: ignore[arg-type]
    found, _ = case.run(kernels)
    assert_same_bits(found, case.expected)


@EXAMPLES
@given(
    batch=st.integers(1, 3),
    steps=st.integers(1, 9),
    size=st.integers(2, 4),
    per_order=st.integers(1, 8),
    columns=st.sampled_from([6, 8, 16, 160]),
    formats=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_rows_equal_the_hosts(
    kernels: HostKernels,
    batch: int,
    steps: int,
    size: int,
    per_order: int,
    columns: int,
    formats: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    columns = max(columns, 16) if formats[0] == NVFP4 else columns
    sizes = {"batch": batch, "steps": steps, "size": size, "per_order": per_order, "columns": columns}
    check(kernels, **sizes, table=formats[0], out=formats[1], seed=seed)


@pytest.mark.parametrize(("table", "out"), FORMATS)
def test_official_sizes(kernels: HostKernels, table: torch.dtype, out: torch.dtype) -> None:
    check(kernels, batch=2, steps=3, size=3, per_order=8, columns=160, table=table, out=out)


def test_ids_are_the_hosts_for_every_token(kernels: HostKernels) -> None:
    """A table whose rows hold their own numbers; thousands of tokens with eos anywhere."""
    case = ngram_rows_case(batch=4, steps=700, size=3, per_order=2, columns=8, table=F32, out=F32, seed=3)
    numbers = torch.arange(len(case.values["table"]), dtype=torch.float32)
    case.values["table"] = numbers[:, None].expand(-1, 8).contiguous()
    case.values["new_len"][:] = 700
    found, _ = case.run(kernels)
    ids = found["out"].view(4, 700, 4, 8)
    assert torch.equal(ids, ids[..., :1].expand_as(ids))
    assert torch.equal(ids[..., 0].long(), expected_ids(case.values))


def expected_ids(values: dict[str, torch.Tensor]) -> torch.Tensor:
    from flashnext.export.graphs.manifest import NgramSpec
    from flashnext.runtime.ngram import ids

    def whole(name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in values[name].numpy().reshape(-1).view("<i8"))

    lists = (whole("multipliers"), whole("head_sizes"), whole("head_offsets"))
    spec = NgramSpec(1, "x", *lists, 2, int(values["eos"]), 8, len(values["table"]), ("s",))
    return torch.from_numpy(ids(spec, values["token_ids"].numpy(), values["context"].numpy()))


def test_same_bits_under_every_schedule(kernels: HostKernels) -> None:
    assert_deterministic(ngram_rows_case(batch=2, steps=3, per_order=4, columns=160, table=E4M3), kernels)


@pytest.mark.parametrize(("table", "row_bytes"), [(BF16, 320), (E4M3, 160), (NVFP4, 80 + 10)])
def test_rows_are_read_once(kernels: HostKernels, table: torch.dtype, row_bytes: int) -> None:
    if kernels.kind == "thread":
        pytest.skip("the build with ThreadSanitizer counts nothing")
    case = ngram_rows_case(batch=1, steps=1, per_order=8, columns=160, table=table, seed=5)
    case.values["new_len"][:] = 1
    report = kernels.launch(case.op, case.values, Execution(watch="sectors"))
    needed = 16 * (row_bytes + 320) / 32  # in and out
    astride = 16 + 1 + 16 * (table == NVFP4)  # rows, the output and scales of rows that do not begin with a sector
    assert report.launches == 1
    assert needed <= report.sectors <= needed + astride + 16  # and what the hash takes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_order": 40}, "1 to 64 heads"),
        ({"out": torch.float16}, "no kernel for these formats"),
    ],
)
def test_what_it_cannot_do_is_refused(kernels: HostKernels, changes: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        ngram_rows_case(**{"batch": 1, "steps": 1, **changes}).run(kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize("table", [E4M3, NVFP4])
def test_row_scales_are_those_of_nvfp4(kernels: HostKernels, table: torch.dtype) -> None:
    values = ngram_rows_case(batch=1, steps=1, columns=32, table=table).values
    values["row_scales"] = torch.ones(len(values["table"]), 2).to(E4M3) if table == E4M3 else None
    with pytest.raises(PluginError, match="NVFP4 tables, and no others, have half as many bytes as columns, and row"):
        kernels.launch("ngram_rows", values)


def test_numbers_of_64_bits() -> None:
    assert pairs([1, -1, 2**40 + 3]).tolist() == [[1, 0], [-1, -1], [3, 256]]
