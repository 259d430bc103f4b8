"""ONNX graphs and the bundle: tracing, external weights, manifest."""
