"""The op table: the only place that knows the custom ops' names, inputs, outputs, attributes, dtypes and shapes.

Everything else comes from it or is checked against it: the torch.library ops and their fake implementations, the
ONNX schemas, the overloads of the portable functions, the TensorRT plugin creators. `python -m
flashnext.export.ops.schema` prints it as Markdown (docs/ops.md).

An op has one or more *forms*: variants with a fixed list of inputs and outputs (a first, a middle and a last Gated
Residual, say). In ONNX a form is the overload of a model-local function; for a plugin it is the attribute `form`; in
PyTorch it is an op of its own, `flashnext::<op>_<form>`.

Shapes are tuples of dimensions. A dimension is an integer, the name of a size that the inputs bind ("B", "H"), the
name of an integer attribute, or a product, sum or rounded-down quotient of those ("n*H", "2*D", "(I+127)//128").

Dimensions used throughout: B sequences in the step, S tokens for each (padded), P = slots + 1 state rows (the last
one takes what must go nowhere), H hidden size, n residual branches, W pending window, C1 = capacity + 1 token rows
(likewise).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashnext.export.ops.ports import Attribute as Attribute
from flashnext.export.ops.ports import Dim, fp8_cache_forms, fp8_forms
from flashnext.export.ops.ports import Form as Form
from flashnext.export.ops.ports import Op as Op
from flashnext.export.ops.ports import Port as Port

DOMAIN = "flashnext"
VERSION = 1
PLUGIN_NAMESPACE, PLUGIN_VERSION = "", str(VERSION)
"""Under which TensorRT's registry knows the ops' plugins; the name is the op's. Both are what TensorRT's ONNX parser
looks for where a node does not say otherwise."""
PLUGIN_DTYPES = {"C": "float8_e4m3fn", "uint8": "int8"}
"""What a plugin takes in place of bytes: TensorRT allows UINT8 at a network's edge only."""

ACTIVATION = ("float32", "bfloat16", "float16")
EXPERT = ("float32", "bfloat16", "float16")
FP8_CODES = ("uint8", "float8_e4m3fn")

SLOTS = Port("slots", "int32", ("B",), "state row of each sequence; distinct, padding rows use P - 1")
PAST_LEN = Port("past_len", "int32", ("B",), "tokens committed before this step, kept ones included")
ACCEPTED = Port("accepted", "int32", ("B",), "how many of the slot's pending tokens were kept")
NEW_LEN = Port("new_len", "int32", ("B",), "valid tokens of this step; 0: the row reads and writes nothing")
EPS = Attribute("eps", "float", "epsilon of the RMSNorms")


# --- GatedResidual --------------------------------------------------------------------------------

R_IN = Port("r", "T", ("B", "S", "n", "H"), "residual branches before the pending write")
R_OUT = Port("r_out", "T", ("B", "S", "n", "H"), "residual branches after the pending write")
Y = Port("y", "T", ("B", "S", "H"), "output of the block whose write is pending")
GATE = Port("s", "float32", ("B", "S", "n"), "write gates of that block")
EMBEDDING = Port("embedding", "T", ("B", "S", "H"), "token embeddings: every branch starts as them")
X = Port("x", "T", ("B", "S", "H"), "input of the next block (takes the place of its pre-norm)")
S_OUT = Port("s_out", "float32", ("B", "S", "n"), "write gates of the next block, in (0, 2)")
READ_WEIGHTS = (
    Port("norm_weight", "T", ("n*H",), "zero-centred RMSNorm weight, per branch"),
    Port("down_weight", "T", ("rank", "n*H"), "W_down"),
    Port("up_weight", "T", ("n*H", "rank"), "W_up"),
)
INJECT = Port("inject_weight", "T", ("n", "n*H"), "W_inject")
READ_OUTPUTS = (R_OUT, X, S_OUT)
PLAIN_RESIDUAL = (
    Form("embed", (EMBEDDING, *READ_WEIGHTS, INJECT), READ_OUTPUTS, "first: the branches are the embedding"),
    Form("pending", (R_IN, Y, GATE, *READ_WEIGHTS, INJECT), READ_OUTPUTS, "middle: write, then read"),
    Form("settled", (R_IN, *READ_WEIGHTS, INJECT), (X, S_OUT), "nothing pending: read only, r is unchanged"),
    Form("last", (R_IN, Y, GATE, *READ_WEIGHTS), (R_OUT, X), "last: write, then read; no further write gates"),
)
START = Form(
    "start",
    (Port("start", "T", ("B", "S", "n", "H"), "branches that are not stored yet"), *READ_WEIGHTS, INJECT),
    READ_OUTPUTS,
    "a draft layer's first: the branches are given, read and stored",
)
"""Only with a state in FP8: a plain one is `settled`."""

GATED_RESIDUAL = Op(
    name="GatedResidual",
    doc=(
        "Writes the pending block output into the residual branches and reads the next block's input from them. "
        "The read uses the float32 value, only what is stored is rounded. Branches in FP8 are E4M3 codes, their scales "
        "static (given, one per branch) or dynamic (one per token and branch, handed on with the codes)."
    ),
    attributes=(Attribute("branches", "int", "residual branches", "n"), EPS),
    type_variables={"T": ACTIVATION},
    forms=(*PLAIN_RESIDUAL, *fp8_forms((*PLAIN_RESIDUAL, START))),
)

# --- NgramInjection -------------------------------------------------------------------------------

NGRAM_WEIGHTS = (
    Port("norm_key_weight", "T", ("n*H",)),
    Port("norm_query_weight", "T", ("n*H",)),
    Port("norm_conv_weight", "T", ("n*H",)),
    Port("conv_weight", "T", ("n*H", 1, "width"), "depthwise, dilated"),
)
NGRAM_INPUTS = (
    Port("key", "T", ("B", "S", "n*H"), "key_proj of the n-gram rows"),
    Port("value", "T", ("B", "S", "H"), "value_proj of the n-gram rows"),
    *NGRAM_WEIGHTS,
    SLOTS,
    PAST_LEN,
    NEW_LEN,
    Port("conv_state", "T", ("P", "Q", "n*H"), "conv inputs in a ring: position p is in row p mod Q"),
)
NGRAM_OUTPUTS = (R_OUT, Port("conv_state_out", "T", ("P", "Q", "n*H")))
NGRAM_ALIASES = {"conv_state_out": "conv_state"}
PLAIN_NGRAM = (
    Form("embed", (EMBEDDING, *NGRAM_INPUTS), NGRAM_OUTPUTS, "in the first layer", NGRAM_ALIASES),
    Form("pending", (R_IN, Y, GATE, *NGRAM_INPUTS), NGRAM_OUTPUTS, "elsewhere", NGRAM_ALIASES),
)

NGRAM_INJECTION = Op(
    name="NgramInjection",
    doc="Pending write, then the gated n-gram value and its dilated convolution added to every branch (one store).",
    attributes=(
        Attribute("branches", "int", "residual branches", "n"),
        EPS,
        Attribute("dilation", "int", "distance of the conv's taps"),
    ),
    type_variables={"T": ACTIVATION},
    forms=(*PLAIN_NGRAM, *fp8_forms(PLAIN_NGRAM)),
)

# --- GatedDeltaNet --------------------------------------------------------------------------------

STATE = ("float32", "bfloat16")
GDN_STATES = (
    Port("conv_state", "T", ("P", "Q", "2*K*Dk+V*Dv"), "conv inputs in a ring: position p is in row p mod Q"),
    Port("recurrent_state", "U", ("P", "V", "Dk", "Dv"), "S after the committed tokens"),
    Port(
        "pending_state",
        "float32",
        ("P", "W", "K*Dk+V*Dv+2*V"),
        "[k | v | g | beta] of the previous step's tokens: k normalised, g the log decay",
    ),
)

GATED_DELTA_NET = Op(
    name="GatedDeltaNet",
    doc="Causal conv, gates, commit of the accepted pending tokens, gated delta rule, gated RMSNorm.",
    attributes=(
        EPS,
        Attribute("key_heads", "int", "each serves V/K consecutive value heads", "K"),
        Attribute("gate", "string", "activation of the output gate: sigmoid or silu"),
    ),
    type_variables={"T": ACTIVATION, "U": STATE},
    forms=(
        Form(
            "default",
            (
                Port("qkv", "T", ("B", "S", "2*K*Dk+V*Dv"), "in_proj_qkv x, before the convolution"),
                Port("z", "T", ("B", "S", "V*Dv"), "in_proj_z x"),
                Port("a", "T", ("B", "S", "V"), "in_proj_a x"),
                Port("b", "T", ("B", "S", "V"), "in_proj_b x"),
                Port("conv_weight", "T", ("2*K*Dk+V*Dv", 1, "width")),
                Port("A_log", "float32", ("V",)),
                Port("dt_bias", "float32", ("V",)),
                Port("norm_weight", "float32", ("Dv",), "multiplies directly (not zero-centred)"),
                SLOTS,
                PAST_LEN,
                ACCEPTED,
                NEW_LEN,
                *GDN_STATES,
            ),
            (
                Port("y", "T", ("B", "S", "V*Dv"), "gated, normalised heads"),
                *(Port(f"{p.name}_out", p.dtype, p.shape) for p in GDN_STATES),
            ),
            aliases={f"{p.name}_out": p.name for p in GDN_STATES},
        ),
    ),
)

# --- SparseAttention ------------------------------------------------------------------------------

QKV = (
    Port("q_gate", "T", ("B", "S", "Nq*2*D"), "q_proj x: per head [query | gate]"),
    Port("k", "T", ("B", "S", "Nkv*D"), "k_proj x"),
    Port("v", "T", ("B", "S", "Nkv*D"), "v_proj x"),
)
QK_NORMS = (Port("q_norm_weight", "T", ("D",)), Port("k_norm_weight", "T", ("D",)))
INDEX = Port("index_qk", "T", ("B", "S", "Ni*Di+Di"), "index_qk_proj x: index queries, then the index key")
INDEX_NORMS = (Port("index_q_norm_weight", "T", ("Di",)), Port("index_k_norm_weight", "T", ("Di",)))
INV_FREQ = Port("inv_freq", "float32", ("F",), "rotary frequencies; 2F columns turn")
KV_STATES = (
    Port("key_state", "T", ("P", "C1", "Nkv", "D"), "keys after norm and RoPE, by position"),
    Port("value_state", "T", ("P", "C1", "Nkv", "D"), "values, by position"),
)
INDEX_STATES = (
    Port("index_tail_state", "T", ("P", "Q", "Di"), "raw index keys in a ring: position p is in row p mod Q"),
    Port("index_key_state", "T", ("P", "NB1", "Di"), "pooled, normalised, rotated key of each complete block"),
)
BLOCKS = Port("blocks", "int32", ("B", "budget_blocks"), "blocks chosen for each row's last valid token; -1: none")
SELECT_INPUTS = (*QKV, INDEX, *QK_NORMS, *INDEX_NORMS, INV_FREQ, SLOTS, PAST_LEN, NEW_LEN, *KV_STATES, *INDEX_STATES)
HEADS_OUT = Port("y", "T", ("B", "S", "Nq*D"), "attention heads times sigmoid(gate)")


def _outs(*states: Port) -> tuple[Port, ...]:
    return tuple(Port(f"{p.name}_out", p.dtype, p.shape) for p in states)


SELECT_ALIASES = {f"{p.name}_out": p.name for p in (*KV_STATES, *INDEX_STATES)}

PLAIN_ATTENTION = (
    Form(
        "select",
        SELECT_INPUTS,
        (HEADS_OUT, *_outs(*KV_STATES, *INDEX_STATES)),
        "blocks are chosen here",
        SELECT_ALIASES,
    ),
    Form(
        "select_return",
        SELECT_INPUTS,
        (HEADS_OUT, *_outs(*KV_STATES, *INDEX_STATES), Port("blocks_out", "int32", BLOCKS.shape, BLOCKS.doc)),
        "blocks are chosen here and those of each row's last valid token returned",
        SELECT_ALIASES,
    ),
    Form(
        "given",
        (
            *QKV,
            *QK_NORMS,
            INV_FREQ,
            SLOTS,
            PAST_LEN,
            NEW_LEN,
            *KV_STATES,
            BLOCKS,
            Port("blocks_len", "int32", ("B",), "tokens seen by the choice (its position + 1)"),
        ),
        (HEADS_OUT, *_outs(*KV_STATES)),
        "blocks are given; attends to them and to every token from r * floor(blocks_len / r) on",
        {f"{p.name}_out": p.name for p in KV_STATES},
    ),
)

SPARSE_ATTENTION = Op(
    name="SparseAttention",
    doc=(
        "QK norms, RoPE, cache update, block selection by the indexer, softmax attention over the chosen tokens, gate. "
        "Keys and values may be E4M3: quotients by the layer's `k_scale` and `v_scale`, rounded to nearest and "
        "saturated. `C` is the dtype of the codes: bytes in portable graphs (as in SparseMoE), typed for a plugin."
    ),
    attributes=(
        EPS,
        Attribute("heads", "int", "query heads", "Nq"),
        Attribute("kv_heads", "int", "key and value heads", "Nkv"),
        Attribute("head_dim", "int", "columns of a head", "D"),
        Attribute("index_heads", "int", "query heads of the indexer", "Ni"),
        Attribute("index_head_dim", "int", "columns of an indexer head", "Di"),
        Attribute("block", "int", "tokens of an index block, r"),
        Attribute("budget_blocks", "int", "complete blocks that a query may choose", "budget_blocks"),
        Attribute("rope_scale", "float", "factor on cos and sin (YaRN's attention factor; 1 without)"),
    ),
    type_variables={"T": ACTIVATION, "C": FP8_CODES},
    forms=(*PLAIN_ATTENTION, *fp8_cache_forms(PLAIN_ATTENTION)),
)

# --- SparseMoE ------------------------------------------------------------------------------------

MOE_INPUTS = (Port("x", "T", ("B", "S", "H")), Port("router_logits", "T", ("B", "S", "experts")))
MOE_OUTPUTS = (Port("y", "T", ("B", "S", "H"), "sum over the chosen experts"),)
BLOCKS_DOC = "value = code * scale of its 128x128 block"
GROUPS_DOC = "E4M3 codes, one per 16 elements; value = code * (scale * scale_2)"
PACKED_DOC = "two E2M1 codes per byte, low nibble first"

SPARSE_MOE = Op(
    name="SparseMoE",
    doc=(
        "Router softmax and top-k (ties to the lower expert), gated expert products, weighted sum. "
        "Quantized weights come as the checkpoint's own bytes. `C` is the dtype of E4M3 codes: bytes in portable "
        "graphs (ONNX has no Gather for 8-bit floats; a table of 256 values decodes them), typed for a plugin."
    ),
    attributes=(
        Attribute("top_k", "int", "experts of a token"),
        Attribute("normalize", "int", "1: the chosen probabilities are divided by their sum"),
    ),
    type_variables={"T": ACTIVATION, "E": EXPERT, "C": FP8_CODES},
    forms=(
        Form(
            "plain",
            (
                *MOE_INPUTS,
                Port("gate_up_weight", "E", ("experts", 2, "I", "H"), "the checkpoint's fused tensor, [gate | up]"),
                Port("down_weight", "E", ("experts", "H", "I")),
            ),
            MOE_OUTPUTS,
            "weights as they are",
        ),
        Form(
            "fp8_block",
            (
                *MOE_INPUTS,
                Port("gate_up_weight", "C", ("experts", 2, "I", "H"), "E4M3 codes, [gate | up]"),
                Port("gate_up_scale", "float32", ("experts", 2, "(I+127)//128", "(H+127)//128"), BLOCKS_DOC),
                Port("down_weight", "C", ("experts", "H", "I"), "E4M3 codes"),
                Port("down_scale", "float32", ("experts", "(H+127)//128", "(I+127)//128"), BLOCKS_DOC),
            ),
            MOE_OUTPUTS,
            "E4M3 weights with a scale per 128x128 block (`weight_scale_inv`, widened to float32)",
        ),
        Form(
            "nvfp4",
            (
                *MOE_INPUTS,
                Port("gate_up_weight", "uint8", ("experts", 2, "I", "H//2"), f"[gate | up], {PACKED_DOC}"),
                Port("gate_up_scale", "C", ("experts", 2, "I", "H//16"), GROUPS_DOC),
                Port("gate_up_scale_2", "float32", ("experts", 2), "global scale of each gate and up matrix"),
                Port("down_weight", "uint8", ("experts", "H", "I//2"), PACKED_DOC),
                Port("down_scale", "C", ("experts", "H", "I//16"), GROUPS_DOC),
                Port("down_scale_2", "float32", ("experts",), "global scale of each down matrix"),
            ),
            MOE_OUTPUTS,
            "E2M1 weights with an E4M3 scale per 16 elements and a global one (`weight_scale`, `weight_scale_2`)",
        ),
    ),
)

OPS: tuple[Op, ...] = (GATED_RESIDUAL, NGRAM_INJECTION, GATED_DELTA_NET, SPARSE_ATTENTION, SPARSE_MOE)


def op(name: str) -> Op:
    """Look an op up by name; KeyError names the known ones."""
    for item in OPS:
        if item.name == name:
            return item
    raise KeyError(f"no op {name!r} in domain {DOMAIN}; known: {', '.join(o.name for o in OPS)}")


def snake_name(name: str) -> str:
    """`GatedResidual` -> `gated_residual`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()


# --- shape rules ----------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(dim: Dim, sizes: Mapping[str, object]) -> object:
    """Value of a dimension: an int, or whatever supports +, * and // (a torch.SymInt while tracing)."""
    if isinstance(dim, int):
        return dim
    return _evaluate_node(ast.parse(dim, mode="eval").body, sizes)


def _evaluate_node(node: ast.expr, sizes: Mapping[str, object]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate_node(node.left, sizes), _evaluate_node(node.right, sizes))
    raise ValueError(f"dimension {ast.unparse(node)!r} is not a sum, product or quotient of sizes")


def bind_sizes(
    op: Op, form: Form, shapes: Sequence[Sequence[object]], attributes: Mapping[str, object]
) -> dict[str, object]:
    """Sizes that the attributes and the inputs' shapes bind (every dimension that is a plain name).

    Raises:
        ValueError: an input has the wrong number of dimensions, or a dimension does not fit the others.
    """
    sizes: dict[str, object] = {a.size: attributes[a.name] for a in op.attributes if a.size}
    for port, shape in zip(form.inputs, shapes, strict=True):
        if len(shape) != len(port.shape):
            raise ValueError(f"{port.name} must have shape {port.shape}, found {tuple(shape)}")
        for dim, size in zip(port.shape, shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                sizes.setdefault(dim, size)
    for port, shape in zip(form.inputs, shapes, strict=True):
        _check(port, shape, sizes)
    return sizes


def _check(port: Port, shape: Sequence[object], sizes: Mapping[str, object]) -> None:
    for dim, size in zip(port.shape, shape, strict=True):
        expected = evaluate(dim, sizes)
        if isinstance(expected, int) and isinstance(size, int) and expected != size:
            raise ValueError(f"{port.name} must have shape {port.shape}, found {tuple(shape)}: {dim} is {expected}")


def markdown() -> str:
    """The table as Markdown, for docs/ops.md."""
    lines = [
        f"# Custom ops (domain `{DOMAIN}`, version {VERSION})",
        "",
        "Made by `python -m flashnext.export.ops.schema`.",
    ]
    for item in OPS:
        lines += ["", f"## {item.name}", "", item.doc, "", "| attribute | kind | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{a.name}` | {a.kind} | {a.doc} |" for a in item.attributes]
        for form in item.forms:
            lines += ["", f"### form `{form.name}`", "", f"{form.doc}", ""]
            lines += ["| port | dtype | shape | meaning |", "| --- | --- | --- | --- |"]
            for way, ports in (("in", form.inputs), ("out", form.outputs)):
                for p in ports:
                    alias = f" (in place of `{form.aliases[p.name]}`)" if p.name in form.aliases else ""
                    shape = ", ".join(str(d) for d in p.shape)
                    lines.append(f"| {way} `{p.name}` | {p.dtype} | [{shape}] | {p.doc}{alias} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
