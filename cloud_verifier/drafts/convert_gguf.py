"""GGUF -> a float32 Hugging Face folder: `python -m cloud_verifier.drafts.convert_gguf GGUF OUT NAME`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, out: Path, name: str) -> None:
    """Dequantise `gguf` to float32 and save model and tokenizer in `out`."""
    folder, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # Dequantised weights still call themselves quantised, and then refuse to be saved.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    # The GGUF carries another title than the published model.
    model.config._name_or_path = name
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
