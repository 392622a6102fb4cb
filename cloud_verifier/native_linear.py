"""Linear layers in float32 on a CPU, at the speed of its memory.

A block of drafted tokens gives a matrix product few rows, and the libraries that torch calls are slow there
(MKL without AVX-512 reads its weights at a quarter of the memory's speed). `linear.c` is a hundred lines that
are not. They are compiled once for the CPU at hand, when it has a C compiler; without one, torch's own layers
stay. Either way the arithmetic is float32 throughout.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cloud_verifier.host import cpu_flags

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("linear.c")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-fopenmp")
_COMPILE_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled product, and how many outputs a panel of its packed weights holds."""

    function: Callable[..., None]
    width: int


def load_kernel(cache: Path) -> Kernel | None:
    """The compiled kernel, compiling it into `cache` the first time; None where that is not possible."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("no C compiler: linear layers run at torch's speed, which is lower for small blocks")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler, cache)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the fast linear layers cannot be compiled (%s): torch's own are used", error)
        return None
    function = library.specwire_linear
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, size, size, pointer, size, pointer, pointer, ctypes.c_int]
    function.restype = None
    library.specwire_linear_width.restype = size
    return Kernel(function, library.specwire_linear_width())


def _compiled(compiler: str, cache: Path) -> Path:
    """Path of the shared library for this source, compiler and CPU."""
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update(
        repr((compiler, _FLAGS, platform.machine(), platform.processor(), sorted(cpu_flags()))).encode()
    )
    library = cache / f"linear-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        compiled, linked = Path(folder, "linear.o"), Path(folder, "linear.so")
        # Linked without -fopenmp: the symbols then come from the OpenMP that torch has loaded, and both
        # share one set of threads.
        for arguments in (
            [*_FLAGS, "-c", str(_SOURCE), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(
                [compiler, *arguments], check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S
            )
        linked.replace(library)
    return library


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
        rows = inputs.reshape(-1, self.in_features).contiguous()
        outputs = rows.new_empty(rows.shape[0], self._num_outputs)
        self._kernel(
            rows.data_ptr(),
            rows.shape[0],
            self.in_features,
            self._panels_at,
            self._num_panels,
            self._bias_at,
            outputs.data_ptr(),
            torch.get_num_threads(),
        )
        if self._num_outputs != self.out_features:
            outputs = outputs[:, : self.out_features]
        return outputs.view(*inputs.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, kernel: Kernel) -> int:
    """Replaces every float32 `nn.Linear` of `model` in place; returns how many."""
    num = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child, kernel))
                num += 1
    return num
