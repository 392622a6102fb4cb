"""Exports against transformers, and the errors that a person meets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cloud_verifier.drafts import cli, export
from cloud_verifier.drafts.export import export_draft
from edge_client.draft_model import DraftModel
from edge_client.manifest import read_manifest, verify_files
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


def test_a_hub_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import AutoConfig

    def unknown(name: str) -> None:
        raise OSError(f"{name} is not a local folder and is not a valid model identifier")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unknown)
    with pytest.raises(SpecwireError, match="'no/model' is neither") as caught:
        export_draft("no/model", tmp_path / "draft")
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
