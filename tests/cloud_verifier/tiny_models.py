"""Random models of a few thousand parameters, saved as folders that load like any other."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
CONTEXT = 160
COMMON: dict[str, Any] = {
    "vocab_size": 64,  # three ids more than the tokenizer has
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that the logits of a random model differ by more than rounding
}


def build(kind: str, **changes: Any) -> torch.nn.Module:
    """A random model of the named kind; `changes` go into its configuration."""
    torch.manual_seed(7)
    settings = {**COMMON, **changes}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**{"use_sliding_window": False, **settings}))
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**{"sliding_window": None, **settings}))
    if kind == "gpt2":
        sizes = {"n_positions": CONTEXT, "n_embd": 48, "n_layer": 3, "n_head": 6, "initializer_range": 0.3}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes))
    raise ValueError(kind)


def save(folder: Path, model: Any, vocab: int = VOCAB) -> Path:
    """Writes the model and a tokenizer of `vocab` ids to `folder`."""
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(folder)
    return folder
