"""What a step costs on ONNX Runtime: memory touched and time, states bound in place or as separate buffers.

    python tests/parity/decode_step.py BUNDLE bound       # or: separate

Run as a process of its own, so that its peak memory is the steps'. The states are zeroed lazily by the system: their
pages count only once something writes to them, so a copied state shows as resident memory. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from flashnext.runtime.engines import onnxruntime_engine
from flashnext.runtime.engines.base import Array
from flashnext.runtime.model_runner import ModelRunner, StepBatch


class SeparateBuffers(onnxruntime_engine.OnnxRuntimeEngine):
    """The engine with every new state in memory of its own, copied back after the step."""

    def bind(self, tensors: Mapping[str, Array]) -> None:
        super().bind(tensors)
        self._new = {}
        for name, out in self.spec.states.items():
            if name in tensors:
                self._new[name] = np.zeros_like(tensors[name])
                self._binding.bind_ortvalue_output(out, ort.OrtValue.ortvalue_from_numpy(self._new[name]))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().run(feeds)
        for name, new in self._new.items():
            self._bound[name][0][...] = new
        return outputs


def batch(runner: ModelRunner, past: int, accepted: int, new: int) -> StepBatch:
    """`new` tokens in slot 0 after `past` others."""
    config = runner.manifest.config
    one = np.ones(1, np.int32)
    return StepBatch(
        token_ids=np.full((1, new), past % config.vocab_size, np.int32),
        slots=0 * one,
        past_len=past * one,
        accepted=accepted * one,
        new_len=new * one,
        context=np.full((1, config.ngram_size - 1), past, np.int64),
        logit_rows=0 * one,
    )


def resident_bytes(which: str) -> int:
    """This process's resident memory on Linux: VmRSS is the present, VmHWM the highest so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


def main(bundle: str, mode: str) -> None:
    if mode == "separate":
        onnxruntime_engine.OnnxRuntimeEngine = SeparateBuffers  # type: ignore[misc]
    runner = ModelRunner.open(bundle, engine="onnxruntime", threads=1)
    before, seconds = resident_bytes("VmRSS"), []
    runner.step(batch(runner, 0, 0, 40))
    runner.step(batch(runner, 40, 0, 8))
    for past in range(12 if mode == "bound" else 3):
        start = time.perf_counter()
        runner.step(batch(runner, 48 + past, 1 if past else 8, 1))
        seconds.append(time.perf_counter() - start)
    report = {
        "state_bytes": {name: state.nbytes for name, state in runner.states.items()},
        "peak_growth": resident_bytes("VmHWM") - before,
        "seconds": min(seconds),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
