"""Models for the tests: the built-in pair (fetched once into the user's cache) and a tiny random one.

The tiny pair runs in microseconds and has the awkward corners of real ones: grouped KV heads, 259 token
ids but a target with 264 logits and a draft with 272, and byte tokens that split characters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from cloud_verifier.drafts.builtin import builtin_draft, builtin_target
from cloud_verifier.drafts.export import export_draft

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TINY_CONTEXT = 512


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """Hugging Face folder of the built-in target."""
    return builtin_target()


@pytest.fixture(scope="session")
def draft_dir() -> Path:
    """Draft folder of the built-in pair at the default precision."""
    return builtin_draft()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of a random 2-layer Llama: 259 ids, 264 logits, context 512."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    _save(_tiny_llama(264, seed=1), folder)
    return folder


@pytest.fixture(scope="session")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with 280 logits, more than its draft has."""
    folder = tmp_path_factory.mktemp("wide") / "target"
    _save(_tiny_llama(280, seed=1), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft folder (fp32) of the tiny target with noise on its weights: 259 ids, 272 logits."""
    import torch

    base = tmp_path_factory.mktemp("tiny")
    target, draft = _tiny_llama(264, seed=1), _tiny_llama(272, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            source = target.get_parameter(name)
            weight[: len(source)] = source
            weight += 0.1 * source.std() * torch.randn(weight.shape, generator=generator)
    _save(draft, base / "draft-hf")
    return export_draft(str(base / "draft-hf"), base / "draft", precision="fp32", name="tiny")


@pytest.fixture(scope="session")
def four_bit_weights() -> Callable[..., NDArray[np.float32]]:
    """A function that makes weights as a 4-bit file dequantises them."""
    return _four_bit_weights


def _four_bit_weights(rng, num_inputs: int, num_outputs: int, *, symmetric: bool = False):
    """Weights [num_inputs, num_outputs] as a Q4_0 or Q4_1 file dequantises them."""
    shape = (num_outputs, num_inputs // 32, 1)
    step = rng.uniform(0.001, 0.02, shape).astype(np.float16).astype(np.float32)
    low = (-8 * step if symmetric else step * rng.normal(-7.5, 1.5, shape)).astype(np.float32)
    level = rng.integers(0, 16, (*shape[:2], 32)).astype(np.float32)
    return (step * level + low).reshape(num_outputs, num_inputs).T.copy()


def _tiny_llama(vocab_size: int, seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TINY_CONTEXT,
        bos_token_id=256,
        eos_token_id=257,
        # Wide enough that distributions are peaked and differ from position to position.
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<|start|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = TINY_TEMPLATE
    tokenizer.save_pretrained(folder)


def byte_tokenizer():
    """One token a byte, then <|start|> 256, <|end|> 257 and <|other|> 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|start|>", "<|end|>", "<|other|>")]
    )
    return tokenizer
