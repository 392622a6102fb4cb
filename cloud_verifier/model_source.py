"""A model by folder or hub name: whether there is one, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloud_verifier.quiet import quiet_transformers
from shared.faults import FaultKind, SpecwireError


def read_config(source: str) -> Any:
    """The model's configuration, which is cheap to read and tells whether the model exists.

    Raises:
        SpecwireError: BAD_REQUEST when there is no such model.
    """
    if _looks_like_path(source) and not (Path(source) / "config.json").is_file():
        what = "has no config.json" if Path(source).is_dir() else "does not exist"
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The folder {source} {what}.",
            "Give a Hugging Face model folder, or a hub name such as TinyLlama/TinyLlama-1.1B-Chat-v1.0.",
        )
    with quiet_transformers():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(source)
        except Exception as error:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"The model '{source}' is neither a folder here nor a model that the hub gives.",
                "Check the name and the network; for a gated model, log in with `hf auth login` first.",
            ) from error


def _looks_like_path(source: str) -> bool:
    path = Path(source).expanduser()
    return path.exists() or path.is_absolute() or source.startswith(".") or source.count("/") > 1
