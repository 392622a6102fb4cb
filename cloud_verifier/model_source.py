"""A model by folder or hub name: whether there is one, in words, and its files."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloud_verifier.quiet import quiet_transformers
from shared.faults import FaultKind, SpecwireError

# What is read of a model on the hub: weights in the other formats that lie beside it would be as large again.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors", "*.bin")  # the first kind that is there


def read_config(source: str) -> Any:
    """The model's configuration, which is cheap to read and tells whether the model exists.

    Raises:
        SpecwireError: BAD_REQUEST when there is no such model.
    """
    folder = local_folder(source)
    with quiet_transformers():
        from transformers import AutoConfig

        if folder is not None:
            with loading(source):
                return AutoConfig.from_pretrained(source)
        try:
            return AutoConfig.from_pretrained(source)
        except Exception as error:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"The model '{source}' is neither a folder here nor a model that the hub gives.",
                "Check the name and the network; for a gated model, log in with `hf auth login` first.",
            ) from error


def local_folder(source: str) -> Path | None:
    """The folder that `source` names, or None when it is a hub name.

    Raises:
        SpecwireError: BAD_REQUEST when it names a folder without a model.
    """
    if not _looks_like_path(source):
        return None
    folder = Path(source)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The folder {source} {what}.",
            "Give a Hugging Face model folder, or a hub name such as TinyLlama/TinyLlama-1.1B-Chat-v1.0.",
        )
    return folder


def fetch(source: str) -> Path:
    """The folder with the model's files, which are downloaded into the hub's own cache first if need be.

    A download that broke goes on where it was. The token of `hf auth login` is used if there is one.

    Raises:
        SpecwireError: BAD_REQUEST when there is no such model, or not for this user; UNAVAILABLE when it
            cannot be downloaded now.
    """
    folder = local_folder(source)
    if folder is not None:
        return folder
    with quiet_transformers():
        from huggingface_hub import snapshot_download

        for weights in _WEIGHTS:
            try:
                # Files of the repository's own folder; those below it are copies in other formats.
                patterns = [*_SMALL_FILES, weights]
                folder = Path(snapshot_download(source, allow_patterns=patterns, ignore_patterns="*/*"))
            except Exception as error:
                raise _not_fetched(source, error) from error
            if any(folder.glob(weights)) and (folder / "config.json").is_file():
                return folder
    raise SpecwireError(
        FaultKind.BAD_REQUEST,
        f"The hub's '{source}' has no config.json, or no weights in safetensors or PyTorch files.",
        "Choose a repository in the format of transformers; one with GGUF files alone cannot be used.",
    )


@contextlib.contextmanager
def loading(source: str) -> Iterator[None]:
    """Around what reads tokenizer and weights: whatever is wrong with them becomes one sentence.

    Raises:
        SpecwireError: BAD_REQUEST for files that are missing, broken, or not given by the hub.
    """
    try:
        yield
    except SpecwireError:
        raise
    except Exception as error:
        # The first sentence of what can be a page.
        reason = re.split(r"\.\s", " ".join(str(error).split()))[0].rstrip(".: ") or type(error).__name__
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The model '{source}' cannot be loaded: {reason}.",
            "Check that its tokenizer and weights are there and whole; for a hub name, check the network, "
            "and for a gated model log in with `hf auth login` first.",
        ) from error


def _not_fetched(source: str, error: Exception) -> SpecwireError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError) or (
        isinstance(error, HfHubHTTPError)
        and not isinstance(error, RepositoryNotFoundError)
        and error.response.status_code in (401, 403)
    ):
        return SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The hub does not give '{source}' to this user.",
            "Ask for access on the model's page of the hub, then log in with `hf auth login`.",
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The model '{source}' is neither a folder here nor a name on the hub.",
            "Check the name; for a private model, log in with `hf auth login` first.",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return SpecwireError(
            FaultKind.UNAVAILABLE,
            f"The files of '{source}' cannot be kept in the hub's cache: {error.strerror}.",
            "Free some space, or choose another place with HF_HOME.",
        )
    return SpecwireError(
        FaultKind.UNAVAILABLE,
        f"The model '{source}' cannot be downloaded: {type(error).__name__}.",
        "Check that the hub can be reached from here, and run the same command again: "
        "it goes on where it was.",
    )


def _looks_like_path(source: str) -> bool:
    path = Path(source).expanduser()
    return path.exists() or path.is_absolute() or source.startswith(".") or source.count("/") > 1
