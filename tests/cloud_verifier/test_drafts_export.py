"""Exports against transformers, and the errors that a person meets."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from rich.console import Console
from typer.testing import CliRunner

from cloud_verifier.drafts import cli, export
from cloud_verifier.drafts.export import export_draft
from cloud_verifier.model_source import fetch
from edge_client.draft_model import DraftModel
from edge_client.manifest import MANIFEST_NAME, read_manifest, verify_files, write_manifest
from shared.faults import FaultKind, SpecwireError
from shared.vocabulary import tokenizer_identity


@pytest.fixture(scope="module")
def four_bit_model(four_bit_weights, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with its linear weights rounded the way a 4-bit file rounds them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("four") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    rng = np.random.default_rng(6)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                num_outputs, num_inputs = weight.shape
                weight.copy_(20 * torch.from_numpy(four_bit_weights(rng, num_inputs, num_outputs).T))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(folder)
    return folder


def mean_overlap(folder: Path, model_dir: Path) -> float:
    """Mean of sum(min(p, q)) between a draft folder and the model it was made from, over 60 positions."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = np.random.default_rng(7).integers(0, 259, 60).tolist()
    draft = DraftModel.load(folder)
    q = torch.softmax(torch.tensor(np.stack([draft.feed([token]).copy() for token in tokens])), dim=-1)
    with torch.inference_mode():
        p = AutoModelForCausalLM.from_pretrained(model_dir)(torch.tensor([tokens])).logits[0, :, :259]
    return float(torch.minimum(torch.softmax(p, dim=-1), q).sum(dim=-1).mean())


def test_auto_keeps_the_blocks_of_a_four_bit_source(four_bit_model: Path, tmp_path: Path) -> None:
    folder = export_draft(str(four_bit_model), tmp_path / "draft")
    assert read_manifest(folder).precision == "q4_exact"
    assert mean_overlap(folder, four_bit_model) > 0.95


def test_auto_falls_back_to_eight_bits(tiny_target: Path, tmp_path: Path) -> None:
    folder = export_draft(str(tiny_target), tmp_path / "draft")
    manifest = read_manifest(folder)
    assert manifest.precision == "int8"
    assert mean_overlap(folder, tiny_target) > 0.95
    identity = tokenizer_identity((tiny_target / "tokenizer.json").read_text(), "target")
    assert manifest.tokenizer == identity
    assert (manifest.vocab_size, manifest.num_logits, manifest.max_context) == (259, 264, 512)
    assert (manifest.bos_id, manifest.eos_ids) == (256, (257,))
    assert (manifest.bos_token, manifest.eos_token) == ("<|start|>", "<|end|>")
    verify_files(folder, manifest)
    (folder / "model.onnx.data").write_bytes(bytes((folder / "model.onnx.data").stat().st_size))
    with pytest.raises(SpecwireError, match=r"model.onnx.data has changed"):
        verify_files(folder, manifest)


def test_a_whole_draft_is_not_made_again(tiny_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    source = str(tiny_draft.with_name("draft-hf"))
    assert export_draft(source, tiny_draft, precision="fp32", name="tiny") == tiny_draft


def test_an_architecture_that_cannot_be_exported(tmp_path: Path, tiny_target: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    model = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=32, n_layer=1, n_head=2)).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_target).save_pretrained(model)
    with pytest.raises(SpecwireError, match="not currently supported") as caught:
        export_draft(str(model), tmp_path / "draft", precision="int8")
    assert caught.value.kind is FaultKind.UNSUPPORTED_MODEL
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ("/no/such/folder", {}, "does not exist"),
        (".", {}, r"has no config.json"),
        ("any/model", {"precision": "int3"}, "precision 'int3' is unknown"),
    ],
)
def test_wrong_requests(tmp_path: Path, source: str, options: dict[str, str], text: str) -> None:
    with pytest.raises(SpecwireError, match=text) as caught:
        export_draft(source, tmp_path / "draft", **options)
    assert caught.value.kind is FaultKind.BAD_REQUEST
    assert not (tmp_path / "draft").exists()


def test_another_folder_is_never_overwritten(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("dear")
    with pytest.raises(SpecwireError, match="is not a draft folder"):
        export_draft(str(tiny_target), tmp_path)
    assert (tmp_path / "letters").read_text() == "dear"


Download = Callable[..., str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """`hub(files)`: every name on the hub is a repository with the files of that folder.

    The hub itself cannot be reached from the tests, and what asks for it all the same is told so at once.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "hub" / "snapshot"
    snapshot.mkdir(parents=True)

    def use(files: Path) -> None:
        def download(name: str, *, allow_patterns: list[str], ignore_patterns: str) -> str:
            for file in files.iterdir():
                if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                    (snapshot / file.name).unlink(missing_ok=True)
                    (snapshot / file.name).symlink_to(file)
            return str(snapshot)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return use


def test_a_hub_name_is_enough(
    hub: Callable[[Path], None], tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody is logged in, and nobody says where the draft is to go."""
    hub(tiny_target)
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(cli.app, ["export", "somebody/tiny-chat"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "cache" / "models" / "somebody--tiny-chat-draft"
    assert f"Draft: {folder} (tiny-chat, int8" in result.output
    manifest = read_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {
        MANIFEST_NAME,
        *(file.name for file in manifest.files),
    }
    assert (manifest.name, manifest.source) == ("tiny-chat", "somebody/tiny-chat")


def test_where_a_draft_goes_when_nobody_says(monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> None:
    monkeypatch.setenv("SPECWIRE_CACHE", "/cache")
    assert export.default_folder("one/chat", "int4") == Path("/cache/models/one--chat-draft-int4")
    assert export.default_folder(str(tiny_target), "auto") == Path(f"/cache/models/{tiny_target.name}-draft")


def test_weights_are_downloaded_in_one_format(hub: Callable[[Path], None], tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in ("config.json", "model.gguf", "pytorch_model.bin"):
        (files / name).touch()
    hub(files)
    assert {path.name for path in fetch("one/chat").iterdir()} == {"config.json", "pytorch_model.bin"}
    (tmp_path / "hub" / "snapshot" / "pytorch_model.bin").unlink()
    (files / "model.safetensors").touch()
    assert {path.name for path in fetch("one/chat").iterdir()} == {"config.json", "model.safetensors"}


def test_the_same_name_of_somebody_else_is_another_draft(
    tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_draft, folder)
    write_manifest(folder, replace(read_manifest(folder), name="chat", source="one/chat"))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", hub_error(LocalEntryNotFoundError("no network"))
    )
    assert export_draft("one/chat", folder, precision="fp32") == folder
    with pytest.raises(SpecwireError, match="'other/chat' cannot be downloaded"):
        export_draft("other/chat", folder, precision="fp32")
    assert read_manifest(folder).source == "one/chat"


def test_a_draft_of_an_earlier_version_says_no_source(
    tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is as good as ever, but only a caller who chose its name knows it again."""
    folder = tmp_path / "draft"
    shutil.copytree(tiny_draft, folder)
    document = json.loads((folder / MANIFEST_NAME).read_text())
    del document["source"]
    (folder / MANIFEST_NAME).write_text(json.dumps(document))
    assert read_manifest(folder).source == ""
    assert DraftModel.load(folder).manifest.name == "tiny"
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", hub_error(LocalEntryNotFoundError("no network"))
    )
    assert export_draft("any/model", folder, precision="fp32", name="tiny") == folder
    with pytest.raises(SpecwireError, match="cannot be downloaded"):
        export_draft("any/tiny", folder, precision="fp32")


def hub_error(error: Exception) -> Download:
    def fail(name: str, **options: Any) -> str:
        raise error

    return fail


def answered(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    return kind(
        "The hub's own words.", response=SimpleNamespace(status_code=status, headers={}, request=None)
    )


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (answered(RepositoryNotFoundError, 401), FaultKind.BAD_REQUEST, "nor a name on the hub"),
        (answered(GatedRepoError, 403), FaultKind.BAD_REQUEST, "Ask for access"),
        (answered(HfHubHTTPError, 401), FaultKind.BAD_REQUEST, "hf auth login"),
        (answered(HfHubHTTPError, 500), FaultKind.UNAVAILABLE, "cannot be downloaded"),
        (LocalEntryNotFoundError("Got: ConnectError"), FaultKind.UNAVAILABLE, "can be reached"),
        (ConnectionError("reset"), FaultKind.UNAVAILABLE, "it goes on where it was"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), FaultKind.UNAVAILABLE, "Free some space"),
    ],
)
def test_what_the_hub_does_not_give(
    error: Exception, kind: FaultKind, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub_error(error))
    with pytest.raises(SpecwireError, match="'any/model'") as caught:
        export_draft("any/model", tmp_path / "draft")
    assert caught.value.kind is kind
    assert text in str(caught.value)
    assert not (tmp_path / "draft").exists()


def test_a_name_that_no_hub_can_have(tmp_path: Path) -> None:
    with pytest.raises(SpecwireError, match=r"'a\.\.b' is neither a folder"):
        export_draft("a..b", tmp_path / "draft")


def test_a_repository_without_a_model_for_transformers(hub: Callable[[Path], None], tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "model.gguf").touch()
    hub(files)
    with pytest.raises(SpecwireError, match=r"no config.json") as caught:
        export_draft("some/gguf", tmp_path / "draft")
    assert caught.value.kind is FaultKind.BAD_REQUEST


def test_a_full_disk_in_the_helper_process(monkeypatch: pytest.MonkeyPatch, tiny_target, tmp_path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "OSError: [Errno 28] No space left on device\n")
    monkeypatch.setattr(export.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(SpecwireError, match="is full") as caught:
        export_draft(str(tiny_target), tmp_path / "draft", precision="int8")
    assert caught.value.kind is FaultKind.UNAVAILABLE


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["export", "/no/such/folder", "--out", str(tmp_path / "draft")])
    assert result.exit_code == 1
    assert "/no/such/folder does not exist" in result.output
    assert "Traceback" not in result.output


def test_the_check_command(tiny_draft: Path) -> None:
    result = CliRunner().invoke(cli.app, ["check", str(tiny_draft)])
    assert result.exit_code == 0
    assert "tiny, fp32" in result.output


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_in_a_terminal_and_in_a_log(terminal: bool) -> None:
    console = Console(file=StringIO(), force_terminal=terminal)
    with cli.progress_bars(console):
        pass
    assert console.file.getvalue() == ""
    with cli.progress_bars(console) as progress:
        progress("Looking", None)
        progress("Downloading", 0.1)
        progress("Downloading", 0.5)
    shown = console.file.getvalue()
    assert shown.index("Looking") < shown.index("Downloading")
    assert terminal or shown.count("Downloading") == 1
