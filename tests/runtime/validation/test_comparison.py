"""Errors in deviations, and where the first fault is, on made-up rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.validation import page
from flashnext.runtime.validation.comparison import DeviationCompare, OutputError, Report, first_fault, suspects
from flashnext.runtime.validation.steps import plan


@pytest.fixture(scope="module")
def manifest(random_bundle: Path) -> Manifest:
    return Manifest.read(random_bundle)


def row(output: str, error: float, graph: str = "body", step: str = "prefill") -> OutputError:
    return OutputError("engine", graph, step, output, error, error / 2, 1.0, 1e-3)


def rows_of(manifest: Manifest, errors: dict[str, float], step: str = "prefill") -> list[OutputError]:
    """Rows of the body, as a run gives them: its own outputs first; errors that are not named are noise."""
    names = ["logits", "hidden", *suspects(manifest, "body")]
    return [row(name, errors.get(name, 1e-7), step=step) for name in names]


def test_no_fault_without_an_error(manifest: Manifest) -> None:
    assert first_fault(manifest, rows_of(manifest, {"logits": 9e-4})) is None


def test_first_in_the_model_s_order_is_named(manifest: Manifest) -> None:
    bad = {"logits": 1.0, "hidden": 1.0, "layers.2.mlp_hyper_connection.y": 0.5, "layers.2.mlp_hyper_connection.x": 0.6}
    fault = first_fault(manifest, rows_of(manifest, {}, "decode") + rows_of(manifest, bad, "verify"))
    assert fault is not None
    assert fault.suspect == "layers.2.linear_attn"
    assert (fault.row.step, fault.row.output) == ("verify", "layers.2.mlp_hyper_connection.y")
    assert "Look at layers.2.linear_attn." in str(fault)
    assert "rises" not in str(fault)


def test_error_that_grows_is_traced_to_its_rise(manifest: Manifest) -> None:
    """Below the tolerance where it is made, above it only later."""
    first, second = "layers.1.mlp_hyper_connection", "layers.2.mlp_hyper_connection"
    grown = {f"{first}.y": 4e-4, f"{first}.r": 4e-4, "layers.2.attn_hyper_connection.y": 8e-4, f"{second}.y": 2e-3}
    grown["logits"] = 1.0
    fault = first_fault(manifest, rows_of(manifest, grown))
    assert fault is not None
    assert fault.suspect == "layers.2.linear_attn"
    assert fault.rise_suspect == "layers.1.linear_attn"
    assert "The error rises most, 400 times to 4.0e-04, at layers.1.mlp_hyper_connection.y" in str(fault)


def test_what_is_not_a_number_is_a_fault(manifest: Manifest) -> None:
    fault = first_fault(manifest, rows_of(manifest, {"layers.1.ple.r": float("nan"), "logits": float("nan")}))
    assert fault is not None
    assert fault.suspect == "layers.1.ple"


@pytest.mark.parametrize(("output", "suspect"), [("logits", "lm_head"), ("hidden", "the end of the graph body")])
def test_behind_the_last_site(manifest: Manifest, output: str, suspect: str) -> None:
    fault = first_fault(manifest, rows_of(manifest, {output: 1.0}))
    assert fault is not None
    assert fault.suspect == suspect


def test_without_sites_the_graph_is_named(manifest: Manifest) -> None:
    fault = first_fault(manifest, [row("logits", 0.0), row("hidden", 1.0)])
    assert fault is not None
    assert fault.suspect == "the graph body; --per-layer names the block"


def test_each_engine_is_compared_step_by_step(manifest: Manifest) -> None:
    class Result(dict[str, np.ndarray]):
        runner_name = ""

    steps = plan(manifest)
    compare = DeviationCompare(1e-3)
    compare.begin("head", steps)
    reference = Result(r=np.arange(8.0), blocks=np.array([3, 1, 2]), other=np.zeros(2))
    for name, offset in (("a", 0.0), ("b", 1.0)):
        for _ in steps:
            found = Result(r=np.arange(8.0) + offset, blocks=np.array([1, 2, 3]))
            found.runner_name = name
            assert set(compare(reference, found)) == {"r", "blocks"}
    assert [(r.engine, r.step) for r in compare.rows[::2]] == [(n, s.name) for n in "ab" for s in steps]
    assert [bool(r) for r in compare.rows] == [True] * 8 + [False, True] * 4
    assert compare.rows[8].relative == pytest.approx(1 / np.arange(8.0).std())


def test_page_has_a_line_for_each_step_and_says_what_is_wrong(manifest: Manifest) -> None:
    bad = {"logits": 1.0, "layers.2.mlp_hyper_connection.y": 0.5}
    rows = rows_of(manifest, {}, "decode") + rows_of(manifest, bad, "<verify>")
    fault = first_fault(manifest, rows)
    assert fault is not None
    text = page.render(Report("torch:reference", ("engine",), rows, [fault], ("a <note>",)))
    assert "Look at layers.2.linear_attn." in text
    assert text.count("<polyline") == 3
    assert "&lt;verify&gt;" in text
    assert "<verify>" not in text
    assert "<note>" not in text
    assert "http" not in text
    assert "<script" not in text
