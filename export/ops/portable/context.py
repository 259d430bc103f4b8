"""What the builder of one op gets: its form's inputs as values, and the model's sizes, attributes and dtypes.

A model has one set of sizes for an op, so they are baked into its function; only the number of sequences B and of
tokens S stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashnext.export.ops.portable.builder import Body, Value

Steps = Literal["any", "few", "many"]
"""What a function serves: steps of any size, decided when it runs, or only those with few (many) tokens."""


@dataclass(frozen=True)
class Context:
    """`sizes` by the table's names of dimensions, `dtypes` of the op's type variables."""

    body: Body
    form: str
    sizes: Mapping[str, int]
    attributes: Mapping[str, float | str]
    dtypes: Mapping[str, str]
    steps: Steps = "any"

    def __getitem__(self, port: str) -> Value:
        return self.body.inputs[port]

    def number(self, attribute: str) -> float:
        return float(self.attributes[attribute])

    def integer(self, attribute: str) -> int:
        return int(self.attributes[attribute])

    def by_steps(
        self, many: Value, if_many: Callable[[], Sequence[Value]], if_few: Callable[[], Sequence[Value]]
    ) -> Sequence[Value]:
        """The results of one of two ways; `many` decides where the function serves both."""
        if self.steps == "any":
            return self.body.if_(many, if_many, if_few)
        return if_many() if self.steps == "many" else if_few()
