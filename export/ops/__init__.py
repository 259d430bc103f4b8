"""The custom ops of domain `flashnext`: one table, and everything that is generated from it or checked against it.

schema.py       the table: names, forms, inputs, outputs, aliases, attributes, shape rules
reference/      the slow, readable meaning of each op in PyTorch
torch_ops.py    torch.library registrations made from the table and the reference
portable/       the same meaning as ONNX functions in plain operators
onnx_schemas.py ONNX schemas made from the table
"""
