"""Checkpoint folders in the Hugging Face layout: what they hold, checked before anything else happens.

    checkpoint = Checkpoint.open("path/to/checkpoint")
    checkpoint.array("layers.0.mlp.experts.down_proj")   # mapped, not loaded

No PyTorch, no safetensors package, no pickle: files are data from strangers, so headers are parsed by hand with every
size checked, and tensors are read-only views of the mapped files. `random_checkpoint` writes small ones to try things.
"""

from flashnext.export.checkpoint.generation import generation_settings
from flashnext.export.checkpoint.identity import identity
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "generation_settings", "identity"]
