"""What the builder of one op gets: its form's inputs as values, and the model's sizes, attributes and dtypes.

A model has one set of sizes for an op, so they are baked into its function; only the number of sequences B and of
tokens S stays open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashnext.export.ops.portable.builder import Body, Value


@dataclass(frozen=True)
class Context:
    """`sizes` by the table's names of dimensions, `dtypes` of the op's type variables."""

    body: Body
    form: str
    sizes: Mapping[str, int]
    attributes: Mapping[str, float | str]
    dtypes: Mapping[str, str]

    def __getitem__(self, port: str) -> Value:
        return self.body.inputs[port]

    def number(self, attribute: str) -> float:
        return float(self.attributes[attribute])

    def integer(self, attribute: str) -> int:
        return int(self.attributes[attribute])
