"""The manifest of a draft folder (`specwire.json`): what the model is, and which files make it whole.

A draft folder holds `model.onnx` with its data file, `tokenizer.json` and the manifest. The manifest
is written last, into a temporary folder that is renamed when everything is there, so a folder with a
manifest whose sizes agree is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shared.faults import FaultKind, SpecwireError
from shared.messages import TokenizerIdentity

FORMAT_VERSION = 1
MANIFEST_NAME = "specwire.json"
MODEL_NAME = "model.onnx"
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the folder."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DraftManifest:
    """What `specwire.json` says.

    `vocab_size` counts the tokenizer's ids (what both sides judge); `num_logits` is the width of the
    model's output, which may be larger (padding) or smaller. `source` is the folder or hub name that it was
    made from; folders of earlier versions do not say it.
    """

    name: str
    precision: str
    vocab_size: int
    num_logits: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    tokenizer_digest: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    chat_template: str | None
    files: tuple[FileRecord, ...]
    source: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def tokenizer(self) -> TokenizerIdentity:
        """The identity that the verifier compares with its own."""
        return TokenizerIdentity(self.tokenizer_digest, self.vocab_size, self.name)


def read_manifest(folder: Path) -> DraftManifest:
    """Read the manifest of `folder` and check that every file has its size; milliseconds.

    Raises:
        SpecwireError: BAD_REQUEST when the folder is no draft folder, is not whole, or comes from
            another version; the text names the folder and the file at fault.
    """
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is not a draft folder: it has no specwire.json" if folder.is_dir() else "does not exist"
        raise _bad_folder(folder, what) from None
    except (OSError, ValueError) as error:
        raise _bad_folder(folder, f"has an unreadable specwire.json ({error})") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise _bad_folder(folder, f"has format version {version}, this program reads {FORMAT_VERSION}")
    try:
        manifest = _from_document(document)
    except (TypeError, ValueError, KeyError) as error:
        raise _bad_folder(folder, f"has a damaged specwire.json ({error})") from error
    for record in manifest.files:
        file = folder / record.name
        if not file.is_file() or file.stat().st_size != record.num_bytes:
            raise _bad_folder(folder, f"is not whole: {record.name} is missing or has the wrong size")
    return manifest


def write_manifest(folder: Path, manifest: DraftManifest) -> None:
    """Write `specwire.json`; the caller does this last."""
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def verify_files(
    folder: Path, manifest: DraftManifest, progress: Callable[[str, float | None], None] | None = None
) -> None:
    """Hash every file of the folder; about a second per 500 MB.

    Raises:
        SpecwireError: BAD_REQUEST naming the first file whose content differs from the manifest.
    """
    for index, record in enumerate(manifest.files):
        if progress is not None:
            progress(f"Checking {record.name}", index / len(manifest.files))
        if file_sha256(folder / record.name) != record.sha256:
            raise _bad_folder(folder, f"is damaged: the content of {record.name} has changed")


def record_file(folder: Path, name: str) -> FileRecord:
    """Size and SHA-256 of `folder / name`."""
    path = folder / name
    return FileRecord(name, path.stat().st_size, file_sha256(path))


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _from_document(document: dict[str, Any]) -> DraftManifest:
    unknown = set(document) - {field.name for field in fields(DraftManifest)}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)}")
    records = tuple(FileRecord(**record) for record in document["files"])
    for record in records:
        if Path(record.name).name != record.name:
            raise ValueError(f"file name {record.name!r} leaves the folder")
    return DraftManifest(**{**document, "files": records, "eos_ids": tuple(document["eos_ids"])})


def _bad_folder(folder: Path, what: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.BAD_REQUEST,
        f"{folder} {what}.",
        "Export the draft again with `cloud-verifier draft export`.",
    )
