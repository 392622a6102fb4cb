"""The compiled layers against torch's, in float64."""

import logging

import pytest
import torch
from torch import nn

from cloud_verifier.native_layers import (
    NarrowEmbedding,
    PackedLinear,
    PackedRmsNorm,
    load_kernel,
    pack_layers,
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    found = load_kernel(tmp_path_factory.mktemp("kernel"))
    if found is None:  # a machine without a C compiler runs torch's own layers, which need no test
        pytest.xfail("no C compiler")
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 192), (1536, 576), (1, 1), (193, 50), (64, 17)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 6, 7, 8, 13, 64])
def test_the_product_is_right_to_float32(kernel, num_rows, num_in, num_out, bias):
    torch.manual_seed(num_rows)
    linear = nn.Linear(num_in, num_out, bias=bias)
    rows = torch.randn(1, num_rows, num_in)
    with torch.inference_mode():
        exact = nn.functional.linear(
            rows.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
        )
        ours = PackedLinear(linear, kernel)(rows)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=4e-6)


def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(kernel):
    torch.manual_seed(1)
    packed = PackedLinear(nn.Linear(577, 800), kernel)
    rows = torch.randn(23, 577)
    num_threads = torch.get_num_threads()
    with torch.inference_mode():
        together = packed(rows)
        assert torch.equal(together, torch.cat([packed(row[None]) for row in rows]))
        assert torch.equal(together[4:9], packed(rows[4:9]))
        torch.set_num_threads(1)
        assert torch.equal(together, packed(rows))
    torch.set_num_threads(num_threads)


def test_rows_need_not_be_contiguous(kernel):
    linear = nn.Linear(40, 32)
    rows = torch.randn(40, 9).t()
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear, kernel)(rows), linear(rows))


@torch.no_grad()
def with_bfloat16_weights(layer):
    """The float32 layer with its weights rounded."""
    layer.weight.copy_(layer.weight.bfloat16())
    return layer


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 192), (1536, 96), (1, 1), (193, 50), (64, 17)])
@torch.inference_mode()
def test_weights_that_are_bfloat16_are_kept_so_and_not_a_bit_differs(kernel, num_in, num_out):
    torch.manual_seed(num_in)
    linear = with_bfloat16_weights(nn.Linear(num_in, num_out))
    wider = with_bfloat16_weights(nn.Linear(num_in, num_out + 1))
    wider.weight[:num_out], wider.bias[:num_out] = linear.weight, linear.bias
    wider.weight[num_out, num_in // 2] = 1 / 3  # which bfloat16 lacks
    narrow, wide = PackedLinear(linear, kernel), PackedLinear(wider, kernel)
    assert (narrow.panels.element_size(), wide.panels.element_size()) == (2, 4)
    for num_rows in (1, 2, 5, 6, 7, 9, 12, 13, 30):
        rows = torch.randn(num_rows, num_in)
        ours, theirs = narrow(rows), wide(rows)
        assert torch.equal(ours, theirs[:, :num_out])
        assert torch.equal(ours[-1:], narrow(rows[-1:]))
        exact = nn.functional.linear(rows.double(), wider.weight.double(), wider.bias.double())
        torch.testing.assert_close(theirs.double(), exact, rtol=2e-6, atol=4e-6)


@torch.inference_mode()
def test_a_layer_in_bfloat16_gives_what_its_weights_give_in_float32(kernel):
    linear = nn.Linear(193, 50, dtype=torch.bfloat16)
    ours = PackedLinear(linear, kernel)
    theirs = PackedLinear(linear.float(), kernel)
    rows = torch.randn(1, 7, 193)
    assert ours(rows).dtype == torch.float32
    assert torch.equal(ours(rows), theirs(rows))
    assert torch.equal(ours(rows.bfloat16()), theirs(rows.bfloat16().float()))


class TinyRMSNorm(nn.Module):
    """As transformers' models write it."""

    offset = 0.0

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.variance_epsilon = 1e-5

    def forward(self, rows):
        mean = rows.pow(2).mean(-1, keepdim=True)
        return (self.offset + self.weight) * (rows * torch.rsqrt(mean + self.variance_epsilon))


class OffsetRMSNorm(TinyRMSNorm):
    offset = 1.0


@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_the_norm_is_right_to_float32_whatever_the_batch(kernel, size):
    torch.manual_seed(size)
    norm = TinyRMSNorm(size)
    rows = torch.randn(2, 5, size)
    with torch.inference_mode():
        ours = PackedRmsNorm(norm.weight, norm.variance_epsilon, kernel)
        torch.testing.assert_close(ours(rows).double(), norm(rows.double()), rtol=2e-6, atol=1e-7)
        assert torch.equal(ours(rows)[1, 2:4], ours(rows[1, 2:4]))
        assert torch.equal(ours(rows.transpose(0, 1)), ours(rows).transpose(0, 1))


def test_only_layers_that_compute_the_same_are_replaced(kernel):
    model = nn.Sequential(
        nn.Embedding(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), TinyRMSNorm(8), OffsetRMSNorm(8)
    )
    assert pack_layers(model, kernel) == 2
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Embedding, PackedLinear, nn.LayerNorm, PackedRmsNorm, OffsetRMSNorm]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_model_of_bfloat16_weights_computes_in_float32(kernel, dtype):
    def build():
        torch.manual_seed(0)
        layers = nn.Embedding(9, 8), TinyRMSNorm(8), nn.LayerNorm(8), nn.Linear(8, 9)
        return nn.Sequential(*layers).bfloat16()

    model, ids = build().to(dtype), torch.tensor([[1, 8, 0]])
    assert pack_layers(model, kernel) == 3
    kinds = [type(layer) for layer in model]
    assert kinds == [NarrowEmbedding, PackedRmsNorm, nn.LayerNorm, PackedLinear]
    ours = model(ids)
    assert ours.dtype == torch.float32
    assert torch.equal(model[0](ids), build()[0](ids).float())
    torch.testing.assert_close(ours.double(), build().double()(ids), rtol=2e-6, atol=4e-6)


def test_a_bfloat16_model_with_matrices_elsewhere_is_left_alone(kernel):
    model = nn.Sequential(nn.Linear(8, 8), nn.Bilinear(8, 8, 8)).bfloat16()
    assert pack_layers(model, kernel) == 0
    assert [type(layer) for layer in model] == [nn.Linear, nn.Bilinear]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_library_is_compiled_once(tmp_path, kernel):
    load_kernel(tmp_path)
    (library,) = tmp_path.iterdir()
    written = library.stat().st_mtime_ns
    assert load_kernel(tmp_path) is not None
    assert [(path, path.stat().st_mtime_ns) for path in tmp_path.iterdir()] == [(library, written)]


def test_without_a_compiler_there_is_no_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load_kernel(tmp_path) is None


def test_a_compiler_that_fails_is_reported_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING):
        assert load_kernel(tmp_path) is None
    assert "cannot be compiled" in caplog.text
    assert list(tmp_path.iterdir()) == []
