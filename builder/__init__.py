"""From a bundle to engines: the graphs of a bundle, built by TensorRT or TensorRT for RTX into plans."""
