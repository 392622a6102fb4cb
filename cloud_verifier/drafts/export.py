"""Any causal language model -> a draft folder that the edge runs without torch.

The ONNX graph comes from `onnxruntime_genai.models.builder`, which runs in a process of its own (it
prints, and it changes global state); `drafts.graph` then makes a step cheaper.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx

from cloud_verifier.drafts.blocks import recover_grid
from cloud_verifier.drafts.cache import Progress, build_folder, disk_error, no_progress
from cloud_verifier.drafts.exact4 import use_grids
from cloud_verifier.drafts.graph import specialise
from cloud_verifier.drafts.precisions import AUTO, DEFAULT_PRECISION, PRECISIONS, Q4_EXACT
from cloud_verifier.model_source import fetch, local_folder, read_config
from edge_client.manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    TOKENIZER_NAME,
    DraftManifest,
    read_manifest,
    record_file,
    write_manifest,
)
from shared.config import cache_dir
from shared.faults import FaultKind, SpecwireError
from shared.vocabulary import tokenizer_identity

DATA_NAME = "model.onnx.data"


def export_draft(
    source: str,
    out: Path | None = None,
    *,
    precision: str = DEFAULT_PRECISION,
    name: str = "",
    progress: Progress = no_progress,
) -> Path:
    """Export the model `source`, a Hugging Face folder or hub name, to the draft folder `out`.

    An `out` that already holds a whole draft of the same source and precision is left as it is. Without
    `out` the draft goes to `default_folder`. `name` is what the manifest calls the model and its source.

    Raises:
        SpecwireError: BAD_REQUEST (no such model, unknown precision, `out` is something else),
            UNSUPPORTED_MODEL (an architecture that cannot be exported), UNAVAILABLE (disk, network).
    """
    if precision not in PRECISIONS:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The precision '{precision}' is unknown.",
            f"Choose one of {', '.join(PRECISIONS)}.",
        )
    out = out or default_folder(source, precision)
    if out.exists() and not (out / MANIFEST_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"{out} exists and is not a draft folder.",
            "Choose another --out; nothing was changed.",
        )
    origin = name or _origin(source)
    label = name or Path(origin).name

    def is_whole(folder: Path) -> bool:
        try:
            manifest = read_manifest(folder)
        except SpecwireError:
            return False
        # An earlier version wrote no source; the name that a caller chose tells as much.
        same = manifest.source == origin or (not manifest.source and manifest.name == name)
        return same and precision in (AUTO, manifest.precision)

    def build(folder: Path) -> None:
        progress(f"Getting {label}", None)
        model = fetch(source)
        read_config(str(model))
        chosen = precision
        if precision == AUTO:
            chosen = Q4_EXACT if _comes_from_four_bits(model) else "int8"
        progress(f"Exporting {label} at {chosen}", None)
        work = folder / "builder"
        _run_builder(model, label, work, "fp32" if chosen == Q4_EXACT else chosen)
        progress(f"Writing {label} at {chosen}", None)
        _assemble(work, folder, label, origin, chosen)
        shutil.rmtree(work)

    return build_folder(out, is_whole, build, progress)


def default_folder(source: str, precision: str) -> Path:
    """Where a draft of `source` goes when nobody says: beside the built-in one, in the cache."""
    origin = _origin(source)
    name = Path(origin).name if local_folder(source) else origin.replace("/", "--")
    return cache_dir() / "models" / (f"{name}-draft" if precision == AUTO else f"{name}-draft-{precision}")


def _origin(source: str) -> str:
    """A hub name as it is, a folder by its absolute path."""
    folder = local_folder(source)
    return str(folder.expanduser().resolve()) if folder else source


def _comes_from_four_bits(folder: Path) -> bool:
    """Whether the model's first linear weight has a 4-bit grid."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                if name.endswith("proj.weight"):
                    weight = tensors.get_tensor(name).float().numpy()
                    return recover_grid(weight.T) is not None
    return False


def _run_builder(model: Path, label: str, out: Path, precision: str) -> None:
    """Run the model builder on a local model; what it prints is kept for the error message only.

    It never asks the hub: for that it would demand a token, even where the model is public.
    """
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out)]
    command += ["-p", precision, "-e", "cpu", "-c", str(out / "cache")]
    finished = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if finished.returncode == 0 and (out / MODEL_NAME).is_file():
        return
    raise build_failed(f"The model '{label}' cannot be exported", finished.stderr, out.parent)


def build_failed(what: str, stderr: str, folder: Path) -> SpecwireError:
    """The typed form of a failed helper process; its last line says why."""
    if os.strerror(errno.ENOSPC) in stderr:
        return disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return SpecwireError(
        FaultKind.UNSUPPORTED_MODEL,
        f"{what}: {lines[-1] if lines else 'the process ended without a message'}",
        "Choose a model with a common architecture, such as Llama, Qwen, Mistral or Gemma.",
    )


def _assemble(work: Path, folder: Path, label: str, origin: str, precision: str) -> None:
    """Turn the builder's folder `work` into a draft folder; the manifest comes last."""
    genai = json.loads((work / "genai_config.json").read_text(encoding="utf-8"))["model"]
    decoder = genai["decoder"]
    head_dim = int(decoder["head_size"])
    for file in (DATA_NAME, TOKENIZER_NAME):
        if not (work / file).is_file():
            raise SpecwireError(
                FaultKind.UNSUPPORTED_MODEL,
                f"The export of {label} has no {file}.",
                "Specwire needs a model with a Hugging Face fast tokenizer.",
            )
    if precision == Q4_EXACT:
        model = onnx.load(work / MODEL_NAME)
        specialise(model, head_dim)
        use_grids(model)
        onnx.save(model, folder / MODEL_NAME, save_as_external_data=True, location=DATA_NAME)
    else:
        # The weights stay in their file, unread.
        model = onnx.load(work / MODEL_NAME, load_external_data=False)
        specialise(model, head_dim)
        onnx.save(model, folder / MODEL_NAME)
        (work / DATA_NAME).rename(folder / DATA_NAME)
    (work / TOKENIZER_NAME).rename(folder / TOKENIZER_NAME)
    identity = tokenizer_identity((folder / TOKENIZER_NAME).read_text(encoding="utf-8"))
    tokenizer_config = _read_json(work / "tokenizer_config.json")
    template = work / "chat_template.jinja"
    write_manifest(
        folder,
        DraftManifest(
            name=label,
            precision=precision,
            vocab_size=identity.size,
            num_logits=int(genai["vocab_size"]),
            num_layers=int(decoder["num_hidden_layers"]),
            num_kv_heads=int(decoder["num_key_value_heads"]),
            head_dim=head_dim,
            max_context=int(genai["context_length"]),
            tokenizer_digest=identity.digest,
            bos_id=genai.get("bos_token_id"),
            eos_ids=_id_tuple(genai.get("eos_token_id")),
            bos_token=_token_text(tokenizer_config.get("bos_token")),
            eos_token=_token_text(tokenizer_config.get("eos_token")),
            chat_template=template.read_text(encoding="utf-8")
            if template.is_file()
            else tokenizer_config.get("chat_template"),
            files=tuple(record_file(folder, file) for file in (MODEL_NAME, DATA_NAME, TOKENIZER_NAME)),
            source=origin,
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _token_text(value: Any) -> str:
    """A special token as transformers writes it: a string, a dictionary with `content`, or nothing."""
    if isinstance(value, dict):
        return str(value.get("content", ""))
    return value or ""
