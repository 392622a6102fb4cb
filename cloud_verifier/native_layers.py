"""Layers on a CPU in float32 arithmetic, at the speed of its memory.

A block of drafted tokens gives a matrix product few rows, and the libraries that torch calls are slow there
(MKL without AVX-512 reads its weights at a quarter of the memory's speed). A norm of a few rows is seven of
torch's operations, each of which takes longer to start than to compute. `layers.c` is slow at neither. It is
compiled once for the CPU at hand, when it has a C compiler; without one, torch's own layers stay.

Weights whose values are all bfloat16's own (those of a model published in bfloat16) are kept as bfloat16 and
widened as they are read: half the memory to read, and not a bit of the results differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cloud_verifier.native import load_library

_SOURCE = Path(__file__).with_name("layers.c")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled functions, and how many outputs a panel of packed weights holds."""

    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    width: int


def load_kernel(cache: Path) -> Kernel | None:
    """The compiled kernel, compiling it into `cache` the first time; None where that is not possible."""
    instead = "linear layers run at torch's speed, which is lower for small blocks"
    library = load_library(_SOURCE, cache, instead=instead)
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    linear, rms_norm = library.specwire_linear, library.specwire_rms_norm
    linear.argtypes = [pointer, size, size, pointer, ctypes.c_int, size, pointer, pointer, ctypes.c_int]
    rms_norm.argtypes = [pointer, size, size, pointer, ctypes.c_float, pointer]
    linear.restype = rms_norm.restype = None
    library.specwire_linear_width.restype = size
    return Kernel(linear, rms_norm, library.specwire_linear_width())


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear`: the same product, from weights packed into panels of `kernel.width` outputs.

    Bit for bit, a row's result depends neither on the rest of the batch nor on whether the panels are narrow.
    """

    panels: torch.Tensor  # [panels, in, width], or, narrow, [panels, in, width / 2, 2]: see layers.c
    bias: torch.Tensor | None  # [width * panels]

    def __init__(self, linear: nn.Linear, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self._kernel = kernel.linear
        self._num_panels = -(-self.out_features // kernel.width)
        self._num_outputs = self._num_panels * kernel.width
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach().float()
        if bias is not None:
            bias = nn.functional.pad(bias, (0, self._num_outputs - self.out_features))
        narrow = _bfloat16(weight)
        self._narrow = narrow is not None
        panels = _panels(weight if narrow is None else narrow.view(torch.int16), kernel.width)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self._panels_at = panels.data_ptr()
        self._bias_at = None if bias is None else bias.data_ptr()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        # Called hundreds of times a pass, where each of torch's operations takes microseconds: hence so few.
        rows = inputs.float().contiguous()
        outputs = rows.new_empty((*rows.shape[:-1], self._num_outputs))
        self._kernel(
            rows.data_ptr(),
            rows.numel() // self.in_features,
            self.in_features,
            self._panels_at,
            self._narrow,
            self._num_panels,
            self._bias_at,
            outputs.data_ptr(),
            torch.get_num_threads(),
        )
        return outputs if self._num_outputs == self.out_features else outputs[..., : self.out_features]


class PackedRmsNorm(nn.Module):
    """Stands in for a model's own RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, epsilon: float, kernel: Kernel) -> None:
        super().__init__()
        # A parameter, because models tell their dtype and device by the first that they find.
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self._size = weight.shape[0]
        self._epsilon = epsilon
        self._kernel = kernel.rms_norm
        self._weight_at = self.weight.data_ptr()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        rows = inputs.float().contiguous()
        outputs = torch.empty_like(rows)
        self._kernel(
            rows.data_ptr(),
            rows.numel() // self._size,
            self._size,
            self._weight_at,
            self._epsilon,
            outputs.data_ptr(),
        )
        return outputs


class NarrowEmbedding(nn.Module):
    """Stands in for an `nn.Embedding` whose weights are bfloat16's own: the same rows, widened."""

    bits: torch.Tensor  # [num_embeddings, embedding_dim] bfloat16, as int16: `Module.float` leaves that alone

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.register_buffer("bits", weight.view(torch.int16), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., embedding_dim]"""
        return nn.functional.embedding(ids, self.bits).view(torch.bfloat16).float()


def pack_layers(model: nn.Module, kernel: Kernel) -> int:
    """Replaces layers of a model in float32 or bfloat16 in place; what is left of it becomes float32.

    A model in bfloat16 that keeps matrices outside of linear layers and embeddings stays as it is: they would
    take twice the memory.

    Returns:
        How many were replaced; 0 where the model stays as it is.
    """
    narrow = next(model.parameters()).dtype == torch.bfloat16
    if narrow and not _holds_only_layers(model):
        return 0
    num = _replace(model, lambda layer: _packed_matrix(layer, kernel))
    if narrow:
        model.float()
    return num + _replace(model, lambda layer: _packed_norm(layer, kernel))


def _holds_only_layers(model: nn.Module) -> bool:
    """Whether each matrix is a linear layer's or an embedding's."""
    return all(
        parameter.ndim < 2 or isinstance(module, nn.Linear | nn.Embedding)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def _replace(model: nn.Module, stand_in: Callable[[nn.Module], nn.Module | None]) -> int:
    num = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = stand_in(child)
            if packed is not None:
                setattr(parent, name, packed)
                num += 1
    return num


def _packed_matrix(layer: nn.Module, kernel: Kernel) -> nn.Module | None:
    """What computes the same as `layer`, or None."""
    if type(layer) is nn.Linear and layer.weight.dtype in (torch.float32, torch.bfloat16):
        return PackedLinear(layer, kernel)
    if type(layer) is nn.Embedding and layer.max_norm is None:
        narrow = _bfloat16(layer.weight.detach())
        return None if narrow is None else NarrowEmbedding(narrow)
    return None


def _packed_norm(layer: nn.Module, kernel: Kernel) -> nn.Module | None:
    """What computes the same as `layer`, or None."""
    weight, epsilon = getattr(layer, "weight", None), getattr(layer, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32 or weight.ndim != 1:
        return None
    if not type(layer).__name__.endswith("RMSNorm") or epsilon is None:
        return None
    # Models share the name, not always the formula (some multiply by 1 + weight): it is tried out.
    packed = PackedRmsNorm(weight, epsilon, kernel)
    sample = torch.linspace(-2, 3, 3 * len(weight)).view(1, 3, -1)
    with torch.inference_mode():
        same = torch.allclose(packed(sample), layer(sample), rtol=1e-5, atol=1e-6)
    return packed if same else None


def _bfloat16(weight: torch.Tensor) -> torch.Tensor | None:
    """`weight` as bfloat16; None where that is not the same numbers."""
    if weight.dtype == torch.bfloat16:
        return weight
    if weight.dtype != torch.float32:
        return None
    # A few rows at a time: they stay in the cache, and most models that are not bfloat16 end it at the first.
    same = all(torch.equal(rows, rows.bfloat16().float()) for rows in torch.split(weight, 64))
    return weight.bfloat16() if same else None


def _panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    """`weight` [out, in] in panels of `width` rows, the last one padded; narrow when it is int16."""
    num_out, num_in = weight.shape
    missing = -num_out % width
    if missing:
        weight = nn.functional.pad(weight, (0, 0, 0, missing))
    if weight.dtype == torch.int16:
        return weight.view(-1, 2, width // 2, num_in).permute(0, 3, 2, 1).contiguous()
    return weight.view(-1, width, num_in).transpose(1, 2).contiguous()
