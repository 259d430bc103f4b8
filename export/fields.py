"""Typed, bounded reading of values that come from strangers' JSON; faults are collected, not raised one by one."""

from __future__ import annotations

from typing import Any, cast

from flashnext.export.files import is_finite

MAX_SIZE = 1 << 24
"""Bound of every size that has no tighter one."""


class FieldReader:
    """Typed access to a raw configuration that collects faults instead of raising at the first."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.faults: list[str] = []

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.faults.append(f"{name} must be an integer, found {value!r}")
        elif not low <= value <= high:
            self.faults.append(f"{name} = {value} is outside {low} … {high}")
        else:
            return value
        return low

    def number(self, name: str, default: float | None, low: float, high: float) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            self.faults.append(f"{name} must be a finite number, found {value!r:.80}")
        elif not low <= value <= high:
            self.faults.append(f"{name} = {value} is outside {low} … {high}")
        else:
            return float(value)
        return low

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.faults.append(f"{name} must be true or false, found {value!r}")
            return default
        return value

    def optional(self, name: str) -> int | None:
        return None if self.raw.get(name) is None else self.integer(name, low=0)

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.raw.get(name) or default
        if value not in allowed:
            self.faults.append(f"{name} = {value!r} is not one of {', '.join(allowed)}")
            return default
        return cast(str, value)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        value = self.raw.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not low <= i <= high for i in items):
            self.faults.append(f"{name} must hold integers from {low} to {high}, found {value!r}")
            return ()
        return tuple(items)

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self.faults.append(f"{name} is missing")
                return 1
            return default
        return value
