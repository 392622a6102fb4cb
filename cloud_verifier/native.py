"""C beside the Python: compiled once for the CPU at hand, where it has a compiler.

The sources are one or two hundred lines and do what torch's own operations are slow at. Without a compiler
torch's stay, and nothing but the speed changes.
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
from pathlib import Path

from cloud_verifier.host import cpu_flags

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-fopenmp")
_COMPILE_TIMEOUT_S = 120


def load_library(source: Path, cache: Path, *, instead: str) -> ctypes.CDLL | None:
    """The library of one C file, compiled into `cache` the first time; None where that is not possible.

    Args:
        source: the file.
        cache: folder of compiled libraries.
        instead: for the log, what runs without it.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("no C compiler: %s", instead)
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler, cache)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s cannot be compiled (%s): %s", source.name, error, instead)
        return None


def _compiled(source: Path, compiler: str, cache: Path) -> Path:
    """Path of the shared library for this source, compiler and CPU."""
    key = hashlib.sha256(source.read_bytes())
    key.update(
        repr((compiler, _FLAGS, platform.machine(), platform.processor(), sorted(cpu_flags()))).encode()
    )
    library = cache / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        compiled, linked = Path(folder, "code.o"), Path(folder, "code.so")
        # Linked without -fopenmp: the symbols then come from the OpenMP that torch has loaded, and both
        # share one set of threads.
        for arguments in (
            [*_FLAGS, "-c", str(source), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked), "-lm"],
        ):
            subprocess.run(
                [compiler, *arguments], check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S
            )
        linked.replace(library)
    return library
