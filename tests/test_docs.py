"""Documents that are made from the code are current."""

from __future__ import annotations

from pathlib import Path

from flashnext.export.ops.schema import markdown

ROOT = Path(__file__).parents[1]


def test_ops_document_is_made_from_the_table() -> None:
    assert (ROOT / "docs/ops.md").read_text(encoding="utf-8") == markdown(), (
        "docs/ops.md is not current. Run: python -m flashnext.export.ops.schema > docs/ops.md"
    )
