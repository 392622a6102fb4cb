"""The target: a stock transformers model that runs one packed pass over many sessions.

A pass meets transformers here alone. The model's own code runs; ours are the cache (the slot pool) and the
attention function that it calls through transformers' attention interface. Whether a model can be served that
way is tried out when it is loaded: two passes with a rollback must give what its own forward gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_verifier.attention import FlexFunction, attend, unsupported
from cloud_verifier.host import free_memory_bytes
from cloud_verifier.kv_pool import KvPool, LayerShape, slot_bytes
from cloud_verifier.model_source import loading, read_config
from cloud_verifier.native_layers import load_kernel, pack_layers
from cloud_verifier.native_rows import row_kernel
from cloud_verifier.pass_layout import PassSpec, Segment, prepare
from shared.config import cache_dir
from shared.faults import FaultKind, SpecwireError
from shared.vocabulary import tokenizer_identity

__all__ = ["Segment", "TargetModel"]

_ATTENTION = "specwire"
ATTENTIONS = ("sdpa", "flex")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Share of the free memory that the pool may take when nobody says how much. On a CPU the memory is only taken
# as slots are used, and other programs live there too.
_FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}
# How far our passes may be from the model's own forward, relative to the largest logit.
_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_CHECK_TOKENS = 12


class _SlotCache:
    """What the model takes for its cache: writes into the pool, and hands the layer's whole store on."""

    is_compileable = False

    def __init__(self, pool: KvPool, write: torch.Tensor) -> None:
        self._pool = pool
        self._write = write

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores key and value [1, kv_heads, T, D]; returns the stores [num_slots + 1, kv_heads, D]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys.index_copy_(0, self._write, key[0].transpose(0, 1))
        values.index_copy_(0, self._write, value[0].transpose(0, 1))
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class TargetModel:
    """A causal language model, its tokenizer, and the pool that its passes read and write.

    Not thread-safe: one thread owns the model and the pool. Build one with `load`.

    Attributes:
        vocab_size: ids that the tokenizer knows; every row of logits is this wide.
        max_context: tokens of one session, prompt and answer together.
        dtype: the weights' number format. The pool's is that of keys, values, arithmetic and logits.
        eos_ids: ids that end an answer; bos_id: the id that starts a text, if there is one.
        tokenizer_json, chat_template: as in the model's folder.
    """

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        *,
        name: str,
        dtype: torch.dtype,
        tokenizer_json: str,
        chat_template: str | None,
        max_context: int,
        flex: FlexFunction | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self._model = model
        self.pool = pool
        self.name = name
        self.tokenizer_json = tokenizer_json
        self.chat_template = chat_template
        self.max_context = max_context
        self.device: torch.device = pool.keys[0].device
        self.dtype = dtype
        self.vocab_size = tokenizer_identity(tokenizer_json).size
        self.eos_ids = _as_ids(getattr(model.generation_config, "eos_token_id", None) or config.eos_token_id)
        self.bos_id: int | None = config.bos_token_id
        self._spec = PassSpec(
            padding_slot=pool.padding_slot,
            heads_per_kv=config.num_attention_heads // pool.keys[0].shape[1],
            dtype=pool.keys[0].dtype,
            device=self.device,
            flex=flex,
        )

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        num_slots: int | None = None,
        kv_cache_bytes: int | None = None,
        max_sessions: int = 64,
        max_context: int | None = None,
        attention: str = "sdpa",
        native: bool = True,
    ) -> TargetModel:
        """Loads a model by folder or hub name, and tries out that it can be served.

        Args:
            name_or_path: a folder that transformers can load, or a name on its hub.
            device: "cpu", "cuda" or "cuda:N".
            dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else bfloat16.
            num_slots: tokens that the pool holds; overrides `kv_cache_bytes`.
            kv_cache_bytes: size of the pool; None takes a share of the free memory.
            max_sessions: the pool chosen from free memory is no larger than this many whole contexts.
            max_context: tokens a session may have; None is all that the model can. A model with a sliding
                window can be served up to the size of its window.
            attention: "sdpa" or "flex"; see TARGET.md.
            native: use compiled layers where the machine has a C compiler (on a CPU, in float32; of bfloat16
                they take the weights, and compute in float32 all the same).

        Raises:
            SpecwireError: UNSUPPORTED_MODEL for a model that cannot roll back or does not attend through the
                interface; BAD_REQUEST for a model that is not there, or an argument that this machine cannot
                honour.
        """
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        target_device, target_dtype = _device(device), _dtype(dtype, device)
        flex = _flex(attention, target_device)
        config = read_config(name_or_path)
        context = _context(config, max_context)
        AttentionInterface.register(_ATTENTION, attend)
        with loading(name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            model = AutoModelForCausalLM.from_pretrained(
                name_or_path, dtype=target_dtype, attn_implementation=_ATTENTION
            )
        model.eval().to(target_device)
        kernel = load_kernel(cache_dir()) if native and target_device.type == "cpu" else None
        packed = kernel is not None and target_dtype != torch.float16 and pack_layers(model, kernel) > 0
        pool_dtype = torch.float32 if packed else target_dtype
        layers = _layer_shapes(config.get_text_config())
        if num_slots is None:
            each = slot_bytes(layers, pool_dtype)
            if kv_cache_bytes is None:
                free = _FREE_SHARE[target_device.type] * free_memory_bytes(target_device)
                kv_cache_bytes = min(int(free), each * max_sessions * context)
            num_slots = kv_cache_bytes // each
        target = cls(
            model,
            KvPool(layers, num_slots, dtype=pool_dtype, device=target_device),
            name=name_or_path,
            dtype=target_dtype,
            tokenizer_json=_tokenizer_json(name_or_path, tokenizer),
            chat_template=tokenizer.chat_template,
            max_context=context,
            flex=flex,
        )
        target._check()
        return target

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass over all segments, of which there is at least one.

        Returns:
            [sum of num_logits, vocab_size] in the pool's dtype, on the device, segment after segment. Ids
            that the tokenizer does not know are cut off; ids that the model does not know are -inf.
        """
        prepared = prepare(segments, self._spec)
        logits: torch.Tensor = self._model(
            input_ids=prepared.tokens[None],
            position_ids=prepared.positions[None],
            cache=_SlotCache(self.pool, prepared.layout.write),
            use_cache=False,
            logits_to_keep=prepared.keep,
            specwire_pass=prepared.layout,
        ).logits[0]
        missing = self.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def warm_up(self) -> None:
        """Runs passes of the usual shapes, so that the first session does not pay for first-time work."""
        if self.device.type == "cpu":
            row_kernel()  # is compiled the first time
        slots = self.pool.allocate(min(64, self.pool.num_slots))
        half = len(slots) // 2
        try:
            for num_new in (half, 8, 1):
                tokens = np.zeros(min(num_new, half), dtype=np.int64)
                pair = [Segment(tokens, slots[:half], 1), Segment(tokens, slots[half:], 1)]
                self.forward(pair)
                self.forward(pair[:1])
        finally:
            self.pool.release(slots)

    @torch.inference_mode()
    def _check(self) -> None:
        """Two sessions, a rollback, and a comparison with the model's own forward.

        Raises:
            SpecwireError: UNSUPPORTED_MODEL when they differ, or when the passes fail.
        """
        num = min(_CHECK_TOKENS, self.max_context, self.pool.num_slots // 2)
        tokens = np.random.default_rng(0).integers(
            0, self._model.get_input_embeddings().num_embeddings, (2, num)
        )
        back = num // 2
        slots = self.pool.allocate(2 * num)
        one, two = slots[:num], slots[num:][::-1].copy()
        try:
            # The second half of the first session's tokens is wrong at first, and rolled back.
            self.forward([Segment(tokens[0][::-1].copy(), one, 1), Segment(tokens[1], two, 1)])
            self.forward([Segment(tokens[0][:back], one[:back], 1)] if back else [Segment(tokens[0], one, 1)])
            again = Segment(tokens[0][back:], one, num - back)
            ours = self.forward([Segment(tokens[1][back:], two, num - back), again])
            self._model.set_attn_implementation("eager")
            inputs = torch.from_numpy(tokens[::-1].copy()).to(self.device)
            own = self._model(input_ids=inputs, use_cache=False).logits[:, back:].flatten(0, 1)
        except SpecwireError:
            raise
        except Exception as error:
            raise unsupported(f"a trial pass failed with {type(error).__name__}: {error}") from error
        finally:
            self._model.set_attn_implementation(_ATTENTION)
            self.pool.release(slots)
        width = min(own.shape[1], ours.shape[1])
        error_size = (ours[:, :width] - own[:, :width]).abs().max() / own.abs().max()
        if not float(error_size) <= _CHECK_TOLERANCE[self._spec.dtype]:
            raise unsupported(f"passes over the slot pool differ from its own by {float(error_size):.2g}")


def _context(config: Any, wanted: int | None) -> int:
    """Tokens that a session may have.

    Raises:
        SpecwireError: UNSUPPORTED_MODEL for layers that cannot roll back.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise unsupported("it is an encoder-decoder")
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        names = ", ".join(sorted(kinds - {"full_attention"}))
        raise unsupported(f"it has layers that cannot forget rejected tokens ({names})")
    most = getattr(text, "max_position_embeddings", None)
    if most is None:
        raise unsupported("its configuration names no longest context")
    context = min(wanted or most, most)
    window = getattr(text, "sliding_window", None)
    slides = window is not None and getattr(text, "use_sliding_window", True)
    if (
        slides
        and ("sliding_attention" in kinds or not getattr(text, "layer_types", None))
        and context > window
    ):
        raise unsupported(
            f"its attention slides over {window} tokens, and a context of {context} needs more",
            f"Serve it with a context of at most {window} tokens (--max-context {window}).",
        )
    return int(context)


def _layer_shapes(config: Any) -> list[LayerShape]:
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [LayerShape(num_kv_heads, dim, dim)] * config.num_hidden_layers


def _tokenizer_json(name_or_path: str, tokenizer: Any) -> str:
    path = Path(name_or_path) / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise unsupported("its tokenizer has no tokenizer.json")
    return str(tokenizer.backend_tokenizer.to_str())


def _as_ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _flex(attention: str, device: torch.device) -> FlexFunction | None:
    """FlexAttention, compiled on CUDA; None for scaled dot-product attention."""
    if attention not in ATTENTIONS:
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"There is no attention {attention!r}.", f"Use {' or '.join(ATTENTIONS)}."
        )
    if attention == "sdpa":
        return None
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device.type == "cuda" else flex_attention


def _device(device: str) -> torch.device:
    chosen = torch.device(device)
    if chosen.type not in _FREE_SHARE:
        raise SpecwireError(FaultKind.BAD_REQUEST, f"There is no device {device!r}.", "Use cpu or cuda.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SpecwireError(FaultKind.BAD_REQUEST, "This machine has no CUDA device.", "Use --device cpu.")
    return chosen


def _dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        # On a CPU float32 rounds no weight, and a model published in bfloat16 is as fast as with bfloat16.
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if dtype not in _DTYPES:
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"There is no dtype {dtype!r}.", f"Use auto, {', '.join(_DTYPES)}."
        )
    return _DTYPES[dtype]
