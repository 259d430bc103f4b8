"""The TensorRT plugin library: one plugin per op of the op table, over the kernels' C interface."""
