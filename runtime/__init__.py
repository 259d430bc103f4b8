"""Engines, decoding and the command line.

`LLM` and `SamplingParams` are loaded when first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashnext.runtime.llm import LLM
    from flashnext.runtime.outputs import Logprob, Piece, RequestOutput
    from flashnext.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "Logprob", "Piece", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "flashnext.runtime.llm",
    "Logprob": "flashnext.runtime.outputs",
    "Piece": "flashnext.runtime.outputs",
    "RequestOutput": "flashnext.runtime.outputs",
    "SamplingParams": "flashnext.runtime.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
