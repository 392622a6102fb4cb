"""Passes over the builder's ONNX graph that make a step of one session cheaper.

The graph of `onnxruntime_genai.models.builder` takes an attention mask only to sum it up, computes
logits for every row, and leaves the head dimension open. After `specialise` its inputs are

    input_ids      int64 [1, num_tokens]
    last_position  int32 [1]   number of positions, the new ones included, minus 1
    total_length   int32 []    number of positions, the new ones included
    past_key_values.N.key / .value   float32 [1, num_kv_heads, capacity, head_dim]

and `logits` is float32 [1, 1, num_logits], of the last token alone.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shared.faults import FaultKind, SpecwireError

LAST_ROW_INDEX = "last_row_index"


def specialise(model: onnx.ModelProto, head_dim: int) -> None:
    """Rewrite the graph in place, as the module says.

    Raises:
        SpecwireError: UNSUPPORTED_MODEL when the graph has another shape than the builder's decoder.
    """
    take_lengths(model.graph)
    keep_last_row(model.graph)
    fix_shapes(model.graph, head_dim)
    drop_unused(model.graph)


def take_lengths(graph: onnx.GraphProto) -> None:
    """Feed GroupQueryAttention the lengths that the builder computes from an attention mask."""
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if not attention:
        raise _unsupported("its attention is not GroupQueryAttention")
    for node in attention:
        node.input[5], node.input[6] = "last_position", "total_length"
    for item in list(graph.input):
        if item.name == "attention_mask":
            graph.input.remove(item)
        elif item.name != "input_ids" and not item.name.startswith("past_key_values."):
            raise _unsupported(f"its graph asks for the input {item.name}")
    graph.input.append(helper.make_tensor_value_info("last_position", TensorProto.INT32, [1]))
    graph.input.append(helper.make_tensor_value_info("total_length", TensorProto.INT32, []))


def keep_last_row(graph: onnx.GraphProto) -> None:
    """Take the last row before the LM head, which is a quarter of a small model's work."""
    head = lm_head(graph)
    hidden = head.input[0]
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), LAST_ROW_INDEX))
    gather = helper.make_node("Gather", [hidden, LAST_ROW_INDEX], [f"{hidden}/last"], axis=1)
    graph.node.insert(list(graph.node).index(head), gather)
    head.input[0] = f"{hidden}/last"


def lm_head(graph: onnx.GraphProto) -> onnx.NodeProto:
    """The multiplication that gives the logits; what follows it (scaling, capping) is elementwise."""
    produced_by = {output: node for node in graph.node for output in node.output}
    node = produced_by.get("logits")
    while node is not None and node.op_type not in ("MatMul", "MatMulNBits", "Gemm"):
        node = next((produced_by[name] for name in node.input if name in produced_by), None)
    if node is None:
        raise _unsupported("it has no LM head that could be found")
    return node


def fix_shapes(graph: onnx.GraphProto, head_dim: int) -> None:
    """Write batch 1 and the head dimension into the graph, so that it alone describes its buffers."""
    for item in (*graph.input, *graph.output):
        dims = item.type.tensor_type.shape.dim
        if item.name.startswith(("past_key_values.", "present.")):
            dims[0].dim_value, dims[3].dim_value = 1, head_dim
            dims[2].dim_param = "capacity"
        elif item.name == "input_ids":
            dims[0].dim_value, dims[1].dim_param = 1, "num_tokens"
        elif item.name == "logits":
            dims[0].dim_value, dims[1].dim_value = 1, 1


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes, initializers and shape notes that no output depends on any more."""
    needed = {item.name for item in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    weights = [item for item in graph.initializer if item.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    del graph.value_info[:]


def _unsupported(why: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNSUPPORTED_MODEL,
        f"The exported draft cannot be used: {why}.",
        "Choose a draft with ordinary attention, such as a Llama, Qwen or Mistral model.",
    )
