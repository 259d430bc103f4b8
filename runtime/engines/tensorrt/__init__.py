"""The `tensorrt` and `tensorrt-rtx` engines: plans that `flashnext build` made, run on a GPU without PyTorch."""
