"""What the op table is made of: ports, attributes, forms, ops; and how a plain form becomes one that keeps FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Dim = int | str


@dataclass(frozen=True)
class Port:
    """One input or output: `dtype` is a type variable of the op ("T", "E") or a fixed dtype ("int32", "float32")."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    doc: str = ""


@dataclass(frozen=True)
class Attribute:
    """One attribute; `kind` is "int", "float" or "string". `size` is the dimension that its value gives, if any."""

    name: str
    kind: str
    doc: str = ""
    size: str = ""


@dataclass(frozen=True)
class Form:
    """A variant of an op. `aliases` maps each state output to the input whose memory it shares."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    doc: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One custom op; `type_variables` lists the dtypes that each type variable may take."""

    name: str
    doc: str
    attributes: tuple[Attribute, ...]
    forms: tuple[Form, ...]
    type_variables: Mapping[str, tuple[str, ...]]

    def form(self, name: str) -> Form:
        for form in self.forms:
            if form.name == name:
                return form
        raise KeyError(f"{self.name} has no form {name!r}; it has {', '.join(f.name for f in self.forms)}")


# --- residual branches in FP8 ---------------------------------------------------------------------

CODES = "float8_e4m3fn"
MODES = ("static", "dynamic")
"""Where scales come from: given with the model, or found token by token."""
_FP8 = "_fp8_"


def fp8_forms(plain: Iterable[Form]) -> tuple[Form, ...]:
    """The forms with branches in FP8, `<plain>_fp8_static` and `<plain>_fp8_dynamic`, of forms that hold them.

    Codes take the place of `r` and `r_out`. Scales stand behind everything else: `r_scale` and `r_out_scale` are
    inputs; `r_token_scale` is an input and `r_out_token_scale` an output.
    """
    return tuple(_fp8_form(form, mode) for form in plain for mode in MODES)


def split_form(name: str) -> tuple[str, str]:
    """`pending_fp8_static` -> (`pending`, `static`); `given_fp8_cache` -> (`given`, `cache`); a plain form's is ""."""
    plain, _, mode = name.partition(_FP8)
    return plain, mode


def _fp8_form(form: Form, mode: str) -> Form:
    inputs, outputs = (tuple(map(_as_codes, ports)) for ports in (form.inputs, form.outputs))
    reads, writes = (any(p.dtype == CODES for p in ports) for ports in (inputs, outputs))
    if mode == "static":
        inputs += (Port("r_scale", "float32", ("n",), "value of r = code * scale"),) if reads else ()
        inputs += (Port("r_out_scale", "float32", ("n",), "value of r_out = code * scale"),) if writes else ()
    else:
        shape = ("B", "S", "n")
        inputs += (Port("r_token_scale", "float32", shape, "value of r = code * scale"),) if reads else ()
        outputs += (Port("r_out_token_scale", "float32", shape, "largest magnitude / 448, or 1"),) if writes else ()
    doc = f"{form.doc}; branches in FP8 with {mode} scales"
    return dataclasses.replace(form, name=f"{form.name}{_FP8}{mode}", inputs=inputs, outputs=outputs, doc=doc)


def _as_codes(port: Port) -> Port:
    """The port itself, or codes in place of the residual branches."""
    if port.name not in ("r", "r_out"):
        return port
    return dataclasses.replace(port, dtype=CODES, doc=f"codes of the {port.doc}")


# --- keys and values in FP8 -----------------------------------------------------------------------

CACHES = ("key_state", "value_state")
CACHE_SCALES = ("k_scale", "v_scale")


def fp8_cache_forms(plain: Iterable[Form]) -> tuple[Form, ...]:
    """The forms with keys and values in FP8, `<plain>_fp8_cache`: codes (`C`) in the caches, their scales last."""
    return tuple(_fp8_cache_form(form) for form in plain)


def _fp8_cache_form(form: Form) -> Form:
    inputs, outputs = (tuple(map(_as_cache_codes, ports)) for ports in (form.inputs, form.outputs))
    scales = tuple(Port(name, "float32", (1,), "value = code * scale") for name in CACHE_SCALES)
    doc = f"{form.doc}; keys and values in FP8"
    return dataclasses.replace(form, name=f"{form.name}{_FP8}cache", inputs=inputs + scales, outputs=outputs, doc=doc)


def _as_cache_codes(port: Port) -> Port:
    """The port itself, or codes in place of a cache."""
    if port.name.removesuffix("_out") not in CACHES:
        return port
    return dataclasses.replace(port, dtype="C", doc=port.doc and f"E4M3 codes of {port.doc}")
