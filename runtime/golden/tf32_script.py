"""For `polygraphy … --trt-config-postprocess-script`; it lies in a folder of golden files as no_tf32.py.

TensorRT for RTX multiplies float32 in TF32 unless told otherwise, with 10 bits of mantissa: errors of 1e-3, which is
more than the tolerance of a comparison in float32.
"""

from __future__ import annotations

import importlib
from typing import Any


def postprocess_config(builder: Any, network: Any, config: Any) -> None:
    """Clear the flag, in whichever module of TensorRT the configuration comes from."""
    module = importlib.import_module(type(config).__module__)
    config.clear_flag(module.BuilderFlag.TF32)
