"""Checkpoint to bundle: configuration, reader, PyTorch model, custom ops, ONNX graphs.

Only `model`, `ops.reference`, `ops.torch_ops` and `graphs.trace` need PyTorch; the rest (configuration, checkpoint
reader, op table, manifest) is plain Python and numpy, because the runtime reads checkpoints and bundles without torch.
"""
