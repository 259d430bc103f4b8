"""The header of the op table, and that parameter structs are filled from it as params.py fills them."""

from __future__ import annotations

import pytest

from flashnext.export.ops import schema
from flashnext.plugins.params import read_params
from flashnext.plugins.tensorrt import table

FORMS = [(op.name, form.name) for op in schema.OPS for form in op.forms]


def test_header_is_current() -> None:
    """If this fails: python -m flashnext.plugins.tensorrt.table"""
    assert table.FILE.read_text(encoding="utf-8") == table.text()


def test_digest_knows_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table.digest()
    monkeypatch.setattr(schema, "OPS", schema.OPS[:-1])
    assert table.digest() != before


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_shapes_of_fields_are_those_of_ports(op: str, form: str) -> None:
    """With any sizes, a port's shape is the shape that the struct's comment gives its field."""
    row, params = schema.op(op), read_params(schema.snake_name(op))
    ports = row.form(form)
    names = {d for p in (*ports.inputs, *ports.outputs) for d in table.names_in(p.shape)}
    sizes = {name: 16 * (i + 3) for i, name in enumerate(sorted(names))}
    sizes |= {a.size: sizes.get(a.size, 7) for a in row.attributes if a.size}
    expressions = table.size_expressions(row, ports, params)
    fields = {name: schema.evaluate(dim, sizes) for name, dim in expressions.items()}
    for field, port in table.ports_of_fields(row, ports, params):
        shape = [schema.evaluate(d, sizes) for d in port.shape]
        wanted = [schema.evaluate(int(d) if d.isdigit() else d, fields) for d in field.shape]
        if field.shape[0] == "tokens" and port.shape[:2] == ("B", "S"):
            shape = [shape[0] * shape[1], *shape[2:]]  # type: ignore[operator]
        assert shape == wanted, port.name


@pytest.mark.parametrize("op", [op.name for op in schema.OPS])
def test_every_field_is_filled_or_left_out_on_purpose(op: str) -> None:
    """What no form fills is what graphs cannot ask for: FP8 weights and stochastic rounding, say."""
    row, params = schema.op(op), read_params(schema.snake_name(op))
    filled = {"workspace", "stream", table.PER_CONTEXT, *(a.name for a in row.attributes)}
    filled |= {field for (name, _), (field, _) in table.CHOICES.items() if name == op}
    for form in row.forms:
        filled |= {f.name for f, _ in table.ports_of_fields(row, form, params)}
        filled |= {*table.size_expressions(row, form, params), *table.format_dtypes(row, form, params)}
    unused = {
        "GatedResidual": {"down_scale", "up_scale", "positions", "site", "seed"},
        "NgramInjection": {"positions", "site", "seed"},
        "SparseAttention": {"score_bytes"},
    }
    assert {f.name for f in params.fields} - filled == unused.get(op, set())
