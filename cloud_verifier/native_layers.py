"""Layers in float32 on a CPU, at the speed of its memory.

A block of drafted tokens gives a matrix product few rows, and the libraries that torch calls are slow there
(MKL without AVX-512 reads its weights at a quarter of the memory's speed). A norm of a few rows is seven of
torch's operations, each of which takes longer to start than to compute. `layers.c` is slow at neither. It is
compiled once for the CPU at hand, when it has a C compiler; without one, torch's own layers stay. Either way
the arithmetic is float32 throughout.
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
    linear.argtypes = [pointer, size, size, pointer, size, pointer, pointer, ctypes.c_int]
    rms_norm.argtypes = [pointer, size, size, pointer, ctypes.c_float, pointer]
    linear.restype = rms_norm.restype = None
    library.specwire_linear_width.restype = size
    return Kernel(linear, rms_norm, library.specwire_linear_width())


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear`: the same product, from weights packed into panels of `kernel.width` outputs.

    A row's result does not depend on the other rows of the batch, bit for bit.
    """

    panels: torch.Tensor  # [panels, in, width]
    bias: torch.Tensor | None  # [width * panels]

    def __init__(self, linear: nn.Linear, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self._kernel = kernel.linear
        self._num_panels = -(-self.out_features // kernel.width)
        self._num_outputs = self._num_panels * kernel.width
        weight = linear.weight.detach()
        bias = None if linear.bias is None else linear.bias.detach()
        missing = self._num_outputs - self.out_features
        if missing:
            weight = nn.functional.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else nn.functional.pad(bias, (0, missing))
        panels = weight.view(self._num_panels, kernel.width, self.in_features).transpose(1, 2).contiguous()
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self._panels_at = panels.data_ptr()
        self._bias_at = None if bias is None else bias.data_ptr()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        # Called hundreds of times a pass, where each of torch's operations takes microseconds: hence so few.
        rows = inputs.contiguous()
        outputs = rows.new_empty((*rows.shape[:-1], self._num_outputs))
        self._kernel(
            rows.data_ptr(),
            rows.numel() // self.in_features,
            self.in_features,
            self._panels_at,
            self._num_panels,
            self._bias_at,
            outputs.data_ptr(),
            torch.get_num_threads(),
        )
        return outputs if self._num_outputs == self.out_features else outputs[..., : self.out_features]


class PackedRmsNorm(nn.Module):
    """Stands in for a model's own RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    weight: torch.Tensor  # [size]

    def __init__(self, weight: torch.Tensor, epsilon: float, kernel: Kernel) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().contiguous(), persistent=False)
        self._size = weight.shape[0]
        self._epsilon = epsilon
        self._kernel = kernel.rms_norm
        self._weight_at = self.weight.data_ptr()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        rows = inputs.contiguous()
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


def pack_layers(model: nn.Module, kernel: Kernel) -> int:
    """Replaces the float32 `nn.Linear`s and RMSNorms of `model` in place; returns how many."""
    num = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed = _packed(child, kernel)
            if packed is not None:
                setattr(parent, name, packed)
                num += 1
    return num


def _packed(layer: nn.Module, kernel: Kernel) -> nn.Module | None:
    """What computes the same as `layer`, or None."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32:
        return None
    if type(layer) is nn.Linear:
        return PackedLinear(layer, kernel)
    epsilon = getattr(layer, "variance_epsilon", None)
    if not type(layer).__name__.endswith("RMSNorm") or weight.ndim != 1 or epsilon is None:
        return None
    # Models share the name, not always the formula (some multiply by 1 + weight): it is tried out.
    packed = PackedRmsNorm(weight, epsilon, kernel)
    sample = torch.linspace(-2, 3, 3 * len(weight)).view(1, 3, -1)
    with torch.inference_mode():
        same = torch.allclose(packed(sample), layer(sample), rtol=1e-5, atol=1e-6)
    return packed if same else None
