"""The 4-bit graph against the float one, on a model of three weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from cloud_verifier.drafts.blocks import quantise_symmetric
from cloud_verifier.drafts.exact4 import offset_slots, use_grids
from shared.faults import FaultKind, SpecwireError

VOCAB = 50


def embed_project_and_unembed(table, weight, head=None) -> onnx.ModelProto:
    """input_ids -> table -> weight -> logits; without `head` the table is tied, as the builder writes it."""
    tied = [helper.make_node("Transpose", ["head"], ["table"], perm=[1, 0])] if head is None else []
    weights = {"weight": weight, "head": table.T.copy() if head is None else head}
    if head is not None:
        weights["table"] = table
    graph = helper.make_graph(
        [
            *tied,
            helper.make_node("Gather", ["table", "input_ids"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "weight"], ["projected"]),
            helper.make_node("MatMul", ["projected", "head"], ["logits"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "num_tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "num_tokens", VOCAB])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def run(model: onnx.ModelProto, ids: list[int]):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": np.array([ids], np.int64)})[0][0]


@pytest.mark.parametrize("width", [64, 576, 1536])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_computes_what_the_float_graph_computes(four_bit_weights, width, symmetric, is_tied) -> None:
    """Activations are rounded to 8 bits on the way, which is what the tolerance is for."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((VOCAB, width)).astype(np.float32)
    level, step = quantise_symmetric(table.reshape(VOCAB, -1, 32), 8)
    table = ((level.astype(np.float32) - 128) * step[..., None]).reshape(table.shape)
    weight = four_bit_weights(rng, width, width, symmetric=symmetric)
    head = None if is_tied else rng.standard_normal((width, VOCAB)).astype(np.float32)
    model = embed_project_and_unembed(table, weight, head)
    expected = run(model, [3, 1, 4, 1, 49])
    use_grids(model)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 2
    assert ("Concat" in kinds) == (not symmetric)
    error = run(model, [3, 1, 4, 1, 49]) - expected
    assert np.sqrt(np.mean(error**2)) < 0.012 * np.sqrt(np.mean(expected**2))


def test_exact_blocks_need_a_four_bit_source() -> None:
    rng = np.random.default_rng(2)
    table, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((VOCAB, 64), (64, 64)))
    with pytest.raises(SpecwireError, match="4-bit file") as caught:
        use_grids(embed_project_and_unembed(table, weight))
    assert caught.value.kind is FaultKind.UNSUPPORTED_MODEL


def test_the_slots_of_the_offsets() -> None:
    for num_blocks in (1, 2, 3, 18, 31, 32, 33, 48, 64, 112, 172, 344):
        first, second, num_copies = offset_slots(num_blocks)
        for slots in (first, second):
            np.testing.assert_array_equal(slots % num_blocks, np.arange(num_blocks))
            assert slots.max() < num_blocks * num_copies
        assert not set(first // 32) & set(second // 32)
