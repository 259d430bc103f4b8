"""The gated delta rule against an implementation of others: ONNX Runtime's `LinearAttention` (opset 27).

The operator knows the recurrence only. Convolution, normalisation and gates around it are done here in plain numpy, so
the whole `GatedDeltaNet` reference op is compared, over prefill, pending tokens and their commit.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from flashnext.export.ops.reference import REFERENCES

Array = NDArray[np.float32]

KEYS, KEY_DIM, VALUE_DIM, WIDTH, WINDOW, EPS = 2, 8, 12, 4, 4, 1e-6


def linear_attention(values: int) -> ort.InferenceSession:
    """A session that runs the operator over q, k, v, S, g, beta with every head of its own."""
    attributes = {"q_num_heads": values, "kv_num_heads": values, "scale": 1.0, "update_rule": "gated_delta"}
    names = ["q", "k", "v", "state", "g", "beta"]
    node = helper.make_node("LinearAttention", names, ["y", "state_out"], **attributes)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (4 if n == "state" else 3)) for n in names]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "state_out")]
    graph = helper.make_graph([node], "linear_attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=11)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


if not onnx.defs.has("LinearAttention"):
    pytest.skip("this onnx package does not define LinearAttention", allow_module_level=True)


def sigmoid(x: Array) -> Array:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


class Plain:
    """GatedDeltaNet around the operator: one sequence, no slots, nothing pending."""

    def __init__(self, weights: dict[str, Array], values: int, gate: str) -> None:
        self.weights, self.values, self.gate = weights, values, gate
        self.session = linear_attention(values)
        self.state = np.zeros((1, values, KEY_DIM, VALUE_DIM), np.float32)
        self.inputs = np.zeros((0, weights["conv_weight"].shape[0]), np.float32)

    def run(self, qkv: Array, z: Array, a: Array, b: Array) -> Array:
        """y [T, V*Dv] of T more tokens."""
        steps = len(qkv)
        self.inputs = np.concatenate([self.inputs, qkv])
        padded = np.pad(self.inputs, ((WIDTH - 1, 0), (0, 0)))[-(steps + WIDTH - 1) :]
        taps = self.weights["conv_weight"][:, 0]
        mixed = np.stack([(padded[t : t + WIDTH] * taps.T).sum(0) for t in range(steps)])
        mixed *= sigmoid(mixed)
        q, k, v = np.split(mixed, [KEYS * KEY_DIM, 2 * KEYS * KEY_DIM], axis=1)
        q, k = (self.per_value_head(self.unit(x.reshape(steps, KEYS, KEY_DIM))) for x in (q, k))
        g = -np.exp(self.weights["A_log"]) * np.log1p(np.exp(a + self.weights["dt_bias"]))
        feeds = {"q": q * np.float32(KEY_DIM**-0.5), "k": k, "v": v, "g": g, "beta": sigmoid(b)}
        y, self.state = self.session.run(None, {n: x[None] for n, x in feeds.items()} | {"state": self.state})
        y = y.reshape(steps, self.values, VALUE_DIM)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * self.weights["norm_weight"]
        return y.reshape(steps, -1) * sigmoid(z) * (z if self.gate == "silu" else 1)

    @staticmethod
    def unit(x: Array) -> Array:
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def per_value_head(self, x: Array) -> Array:
        return x.repeat(self.values // KEYS, axis=1).reshape(len(x), -1)


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
@pytest.mark.parametrize("values", [2, 4, 6], ids=lambda v: f"{v}-value-heads")
def test_reference_equals_linear_attention(values: int, gate: str) -> None:
    """Steps of 70 tokens (committed at once), then of 4 and 1 (pending, then committed), and 6 again."""
    random = np.random.default_rng(values)
    channels = 2 * KEYS * KEY_DIM + values * VALUE_DIM

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32)

    weights = {
        "conv_weight": normal(channels, 1, WIDTH),
        "A_log": np.log(random.uniform(0.02, 1, values)).astype(np.float32),
        "dt_bias": normal(values),
        "norm_weight": 1 + normal(VALUE_DIM) / 2,
    }
    plain = Plain(weights, values, gate)
    states = [
        np.full((1, WIDTH - 1 + WINDOW, channels), np.nan, np.float32),
        np.full((1, values, KEY_DIM, VALUE_DIM), np.nan, np.float32),
        np.full((1, WINDOW, KEYS * KEY_DIM + values * VALUE_DIM + 2 * values), np.nan, np.float32),
    ]
    past, pending = 0, 0
    for steps in (70, 4, 4, 1, 1, 6, 3):
        tokens = [normal(steps, n) for n in (channels, values * VALUE_DIM, values, values)]
        lengths = [np.array([n], np.int32) for n in (0, past, pending, steps)]
        arrays = [*(t[None] for t in tokens), *weights.values(), *lengths, *states]
        y = REFERENCES["GatedDeltaNet"]["default"](*map(torch.from_numpy, arrays), eps=EPS, key_heads=KEYS, gate=gate)[
            0
        ]
        np.testing.assert_allclose(y[0].numpy(), plain.run(*tokens), rtol=1e-5, atol=2e-5)
        past, pending = past + steps, steps if steps <= WINDOW else 0
