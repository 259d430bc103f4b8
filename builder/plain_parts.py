"""What TensorRT has to do by itself: a graph in plugin form, cut at its custom nodes.

Whatever a custom node gives becomes an input, whatever it takes becomes an output, and the node goes. What is left is
plain: projections, casts, sums. TensorRT for RTX shares parser and checks with TensorRT and builds without a GPU, so
building the parts there tells whether a graph's plain nodes can be built at all (`python benchmarks/build_engines.py
--plain-parts` does it for official sizes, tests for small ones).
"""

from __future__ import annotations

import onnx

from flashnext.export.ops import onnx_schemas, schema


def cut(plugin_graph: bytes) -> bytes:
    """The plain nodes of a graph in plugin form (`plugin_graph.plugin_form`), as one graph.

    Shapes of what is cut are inferred by the op table's rules, so nodes that contradict it are noticed.

    Raises:
        onnx.shape_inference.InferenceError: a custom node's attributes, inputs or outputs are not those of the table.
    """
    onnx_schemas.register()
    model = onnx.load_model_from_string(plugin_graph)
    del model.graph.value_info[:]
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    graph = model.graph
    known = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    custom = [n for n in graph.node if n.domain == schema.DOMAIN]
    for node in custom:
        _name_steps(node, known)
    plain = [n for n in graph.node if n.domain != schema.DOMAIN]
    made = {name for n in plain for name in n.output}
    read = {name for n in plain for name in n.input}
    given = {name for n in custom for name in n.output}
    inputs = [v for v in graph.input if v.name in read] + [known[name] for name in sorted(given & read)]
    wanted = [name for n in custom for name in n.input if name in made]
    outputs = [known[n] for n in dict.fromkeys([*wanted, *(v.name for v in graph.output if v.name in made)])]
    weights = [t for t in graph.initializer if t.name in read]
    parts = onnx.helper.make_graph(plain, graph.name, inputs, outputs, weights)
    imports = [o for o in model.opset_import if o.domain != schema.DOMAIN]
    made_model = onnx.helper.make_model(parts, opset_imports=imports, ir_version=model.ir_version)
    return bytes(made_model.SerializeToString())


def _name_steps(node: onnx.NodeProto, known: dict[str, onnx.ValueInfoProto]) -> None:
    """Call the dynamic dimensions of what a custom node gives B and S, where inference has lost their names."""
    form = schema.op(node.op_type).form(next(a.s.decode() for a in node.attribute if a.name == "form"))
    for name, port in zip(node.output, form.outputs, strict=True):
        for dim, size in zip(known[name].type.tensor_type.shape.dim, port.shape, strict=True):
            if size in ("B", "S"):
                dim.dim_param = str(size)
