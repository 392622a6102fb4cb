"""The `q4_exact` precision: the float graph with its 4-bit grids put back in place.

A block is `step * level + low`. ONNX Runtime's fast 4-bit kernel computes `step * (level - 8)`, with
no offset; integer zero points round the offset away, and float ones leave the fast path (60 times
slower). So the rest, `(low + 8 step) * sum of the block's inputs`, enters as extra inputs: the sums
of the blocks, whose weights are the offsets, themselves in 4 bits, and once more for what that
rounding leaves over. It costs three small operators and 8-11 % more weights. (One rounding alone
overlaps with the target at 0.84, two at 0.96; no offsets at all give noise.)
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from cloud_verifier.drafts.blocks import BLOCK, Grid, pack_nibbles, quantise_symmetric, recover_grid
from cloud_verifier.drafts.graph import drop_unused, lm_head
from shared.faults import FaultKind, SpecwireError

_DOMAIN = "com.microsoft"


def use_grids(model: onnx.ModelProto) -> None:
    """Replace the float multiplications in place: 4 bits where there is a grid, 8 bits elsewhere.

    Raises:
        SpecwireError: UNSUPPORTED_MODEL when the weights do not come from a 4-bit file.
    """
    graph = model.graph
    weights = {item.name: item for item in graph.initializer}
    head = lm_head(graph)
    extended: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    num_exact = 0
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = numpy_helper.to_array(weights[node.input[1]])
        grid = None if node is head else recover_grid(weight)
        if grid is None:
            nodes.append(_eight_bits(graph, node, weight))
        else:
            nodes += _four_bits(graph, node, grid, extended)
            num_exact += 1
    if not num_exact:
        raise SpecwireError(
            FaultKind.UNSUPPORTED_MODEL,
            "The model's weights do not come from a 4-bit file, so they cannot be kept exactly in 4 bits.",
            "Choose the precision int8 or int4.",
        )
    del graph.node[:]
    graph.node.extend(nodes)
    _quantise_embedding(graph, head)
    drop_unused(graph)
    if not any(item.domain == _DOMAIN for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _four_bits(
    graph: onnx.GraphProto, node: onnx.NodeProto, grid: Grid, extended: dict[str, str]
) -> list[onnx.NodeProto]:
    """`node` in 4 bits, and the nodes that append the block sums to its input unless they are there."""
    num_outputs, num_blocks, _ = grid.level.shape
    offset = grid.low + 8 * grid.step  # [num_outputs, num_blocks]
    if np.abs(offset).max() <= 1e-3 * np.abs(grid.step).max():
        return [_matmul_bits(graph, node, node.input[0], pack_nibbles(grid.level), grid.step, 4)]
    source, nodes = node.input[0], []
    first, second, num_copies = offset_slots(num_blocks)
    if source not in extended:
        extended[source] = f"{source}/with_sums"
        nodes += _append_sums(graph, source, extended[source], num_blocks, num_copies)
    num_slots = -(-num_blocks * num_copies // BLOCK) * BLOCK
    levels, steps = [pack_nibbles(grid.level)], [grid.step]
    slots = np.zeros((num_outputs, num_slots), np.float32)
    slots[:, first] = offset
    level, step = quantise_symmetric(slots.reshape(num_outputs, -1, BLOCK), 4)
    kept = ((level.astype(np.float32) - 8) * step[..., None]).reshape(slots.shape)
    # What the first rounding loses, in a block of its own and thus with a step of its own.
    slots[:, second] = offset - kept[:, first]
    level, step = quantise_symmetric(slots.reshape(num_outputs, -1, BLOCK), 4)
    levels.append(pack_nibbles(level))
    steps.append(step)
    nodes.append(
        _matmul_bits(
            graph,
            node,
            extended[source],
            np.concatenate(levels, axis=1),
            np.concatenate(steps, axis=1),
            4,
            num_inputs=num_blocks * (BLOCK + num_copies),
        )
    )
    return nodes


def offset_slots(num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Where the two roundings of a block's offset go among the appended copies of the block sums.

    Slot `i` holds the sum of block `i % num_blocks`. The second rounding must not share a block of 32
    slots, and with it a step, with the first.

    Returns:
        the first slot of each block, its second slot [num_blocks], and the number of copies.
    """
    start = -(-num_blocks // BLOCK) * BLOCK
    blocks = np.arange(num_blocks)
    second = start + (blocks - start) % num_blocks
    return blocks, second, -(-int(second.max() + 1) // num_blocks)


def _append_sums(
    graph: onnx.GraphProto, source: str, target: str, num_blocks: int, num_copies: int
) -> list[onnx.NodeProto]:
    """`target` = `source` followed by the sums of its blocks, `num_copies` times."""
    shape = f"block_shape_{num_blocks}"
    known = {item.name for item in graph.initializer}
    for name, value in ((shape, [0, 0, num_blocks, BLOCK]), ("last_axis", [3])):
        if name not in known:
            graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    return [
        helper.make_node("Reshape", [source, shape], [f"{source}/blocks"]),
        helper.make_node("ReduceSum", [f"{source}/blocks", "last_axis"], [f"{source}/sums"], keepdims=0),
        helper.make_node("Concat", [source, *[f"{source}/sums"] * num_copies], [target], axis=-1),
    ]


def _eight_bits(graph: onnx.GraphProto, node: onnx.NodeProto, weight: NDArray[np.float32]) -> onnx.NodeProto:
    level, step = quantise_symmetric(np.ascontiguousarray(weight.T).reshape(weight.shape[1], -1, BLOCK), 8)
    return _matmul_bits(graph, node, node.input[0], level, step, 8)


def _matmul_bits(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    source: str,
    packed: NDArray[np.uint8],
    step: NDArray[np.float32],
    bits: int,
    *,
    num_inputs: int = 0,
) -> onnx.NodeProto:
    """`accuracy_level` 4 multiplies in int8, which is what makes the kernel fast."""
    weight = node.input[1]
    graph.initializer.append(numpy_helper.from_array(packed, f"{weight}/levels"))
    graph.initializer.append(numpy_helper.from_array(step.reshape(-1), f"{weight}/steps"))
    return helper.make_node(
        "MatMulNBits",
        [source, f"{weight}/levels", f"{weight}/steps"],
        list(node.output),
        name=node.name,
        domain=_DOMAIN,
        K=num_inputs or step.shape[1] * BLOCK,
        N=len(step),
        bits=bits,
        block_size=BLOCK,
        accuracy_level=4,
    )


def _quantise_embedding(graph: onnx.GraphProto, head: onnx.NodeProto) -> None:
    """Look tokens up in 8 bits: in the LM head's table when the two are tied, else in one of their own."""
    weights = {item.name: item for item in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    lookup = next(node for node in graph.node if node.op_type == "Gather" and node.input[1] == "input_ids")
    table = lookup.input[0]
    if table in producers:  # Transpose(LM head)
        table = producers[table].input[0]
    if table == head.input[1]:
        shape = weights[f"{table}/levels"].dims
        graph.initializer.append(
            numpy_helper.from_array(np.array([shape[0], -1], np.int64), "embedding_shape")
        )
        nodes = [helper.make_node("Reshape", [f"{table}/levels", "embedding_shape"], ["embedding/levels"])]
        steps = numpy_helper.to_array(weights[f"{table}/steps"]).reshape(shape[0], -1)
    else:
        values = numpy_helper.to_array(weights[table])
        level, steps = quantise_symmetric(values.reshape(len(values), -1, BLOCK), 8)
        graph.initializer.append(numpy_helper.from_array(level.reshape(values.shape), "embedding/levels"))
        nodes = []
    graph.initializer.append(numpy_helper.from_array(steps, "embedding/steps"))
    nodes.append(
        helper.make_node(
            "GatherBlockQuantized",
            ["embedding/levels", "input_ids", "embedding/steps"],
            list(lookup.output),
            domain=_DOMAIN,
            bits=8,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
    )
    index = list(graph.node).index(lookup)
    graph.node.remove(lookup)
    for node in reversed(nodes):
        graph.node.insert(index, node)
