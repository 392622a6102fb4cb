"""What every measurement states: the machine, the versions, medians with their spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("specwire", "torch", "transformers", "onnxruntime", "grpcio", "protobuf", "numpy", "tokenizers")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of `n` measurements."""

    n: int
    median: float
    p25: float
    p75: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ValueError("nothing was measured")
        ordered = sorted(values)
        if len(ordered) == 1:
            return cls(1, *[ordered[0]] * 5)
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(len(ordered), quartiles[1], quartiles[0], quartiles[2], ordered[0], ordered[-1])


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, accelerator."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "vector_instructions": _vector_instructions(),
        "cuda_device": _cuda_device(),
    }


def versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in _PACKAGES}
    return {"commit": _commit(), "python": platform.python_version()} | installed


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes `report` with machine and versions in front; dataclasses become objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine(), "versions": versions()} | report
    path.write_text(json.dumps(whole, indent=1, default=asdict) + "\n", encoding="utf-8")


def _commit() -> str:
    """Of the checkout that this runs from; empty where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _vector_instructions() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cuda_device() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
