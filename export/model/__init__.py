"""The PyTorch model: what the graphs are traced from, and the reference that engines are compared with.

rope.py     rotary frequencies, YaRN
layers.py   the model's layers over the custom ops; parameters carry the checkpoint's names
graphs.py   head, body and MTP as modules with the inputs and outputs of `flashnext.export.graphs.io`
loading.py  parameters from a checkpoint
"""
