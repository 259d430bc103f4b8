"""Parameters of a graph module from a checkpoint.

Tensors are mapped from the files. For a float32 model they are converted while loading; otherwise they stay as
stored and the layers cast where they compute.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.model.graphs import Graph, build_graph
from flashnext.export.model.rope import rotary_frequencies


def to_torch(array: NDArray[np.generic]) -> Tensor:
    """A tensor over the array's memory; the 16- and 8-bit floats of ml_dtypes are reinterpreted, not converted."""
    name = array.dtype.name
    foreign = name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    bits = array.view({1: np.uint8, 2: np.int16}[array.dtype.itemsize]) if foreign else array
    with warnings.catch_warnings():
        # Weights are mapped read-only and nothing writes to them; torch warns about that for every one.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(bits)
    return tensor.view(getattr(torch, name)) if foreign else tensor


def build_on_meta(config: ModelConfig, options: BuildOptions, name: str) -> Graph:
    """The graph's module without memory for its parameters; its constants (rotary frequencies) are real."""
    with torch.device("meta"):
        graph = build_graph(config, options, name)
    graph.inv_freq = torch.nn.Buffer(rotary_frequencies(config)[0], persistent=False)
    return graph.eval().requires_grad_(False)


def load_graph(checkpoint: Checkpoint, config: ModelConfig, options: BuildOptions, name: str) -> Graph:
    """A graph with the checkpoint's parameters, ready to run."""
    graph = build_on_meta(config, options, name)
    parameters = {key: _parameter(checkpoint, key, options) for key in graph.state_dict()}
    graph.load_state_dict(parameters, assign=True)
    return graph.requires_grad_(False)


def _parameter(checkpoint: Checkpoint, key: str, options: BuildOptions) -> Tensor:
    array = checkpoint.array(key)
    if options.dtype == "float32":
        return torch.from_numpy(array.astype(np.float32))
    return to_torch(array.copy())
