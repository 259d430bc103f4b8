"""CUDA kernels and the TensorRT plugin library of the ops in `flashnext.export.ops.schema`."""
