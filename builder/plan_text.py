"""Which ONNX nodes a plan of TensorRT for RTX says that its kernels compute.

A plan's own text lists, with each kernel, the nodes that went into it. Reading it needs no GPU, which loading a plan
would. So what becomes of each custom node can be told on any machine: a node whose work is nowhere was lost.

    python -m flashnext.builder.plan_text PLAN           # custom nodes, and how many of their plain nodes are listed
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from flashnext.builder.portable_graph import SEPARATOR

LAYER = re.compile(rb"\[ONNX Layer: ([^\]]{1,1000})\]")


def layer_names(plan: bytes) -> set[str]:
    """Names of the ONNX nodes that the plan lists."""
    return {name.decode(errors="replace") for name in LAYER.findall(plan)}


def listed_nodes(plan: bytes) -> Counter[str]:
    """How many plain nodes of each custom node the plan lists."""
    return Counter(name.partition(SEPARATOR)[0] for name in layer_names(plan) if SEPARATOR in name)


if __name__ == "__main__":
    for name, count in sorted(listed_nodes(Path(sys.argv[1]).read_bytes()).items()):
        print(f"{count:6} {name}")
