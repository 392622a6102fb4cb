"""Linear layers in float32 on a CPU, at the speed of its memory.

A block of drafted tokens gives a matrix product few rows, and the libraries that torch calls are slow there
(MKL without AVX-512 reads its weights at a quarter of the memory's speed). `linear.c` is a hundred lines that
are not. They are compiled once for the CPU at hand, when it has a C compiler; without one, torch's own layers
stay. Either way the arithmetic is float32 throughout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cloud_verifier.native import load_library

_SOURCE = Path(__file__).with_name("linear.c")


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled product, and how many outputs a panel of its packed weights holds."""

    function: Callable[..., None]
    width: int


def load_kernel(cache: Path) -> Kernel | None:
    """The compiled kernel, compiling it into `cache` the first time; None where that is not possible."""
    instead = "linear layers run at torch's speed, which is lower for small blocks"
    library = load_library(_SOURCE, cache, instead=instead)
    if library is None:
        return None
    function = library.specwire_linear
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, size, size, pointer, size, pointer, pointer, ctypes.c_int]
    function.restype = None
    library.specwire_linear_width.restype = size
    return Kernel(function, library.specwire_linear_width())


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear`: the same product, from weights packed into panels of `kernel.width` outputs.

    A row's result does not depend on the other rows of the batch, bit for bit.
    """

    panels: torch.Tensor  # [panels, in, width]
    bias: torch.Tensor | None  # [width * panels]

    def __init__(self, linear: nn.Linear, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self._kernel = kernel.function
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
        # Torch's own operations cost more here than the product of a single row, hence so few of them.
        rows = inputs if inputs.is_contiguous() else inputs.contiguous()
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


def pack_linears(model: nn.Module, kernel: Kernel) -> int:
    """Replaces every float32 `nn.Linear` of `model` in place; returns how many."""
    num = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child, kernel))
                num += 1
    return num
