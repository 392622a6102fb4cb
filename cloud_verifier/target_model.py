"""The target: a stock transformers model that runs one packed pass over many sessions.

The only file that knows transformers. The model's own code runs; ours are the cache (the slot pool) and the
attention function that it calls through transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloud_verifier.attention import Group, PassLayout, attend, causal_mask, is_run, plan_groups
from cloud_verifier.host import free_memory_bytes, has_bfloat16_arithmetic
from cloud_verifier.kv_pool import KvPool, LayerShape, slot_bytes
from cloud_verifier.native_linear import load_kernel, pack_linears
from shared.config import cache_dir
from shared.faults import FaultKind, SpecwireError

_ATTENTION = "specwire"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Share of the free memory that the pool may take when nobody says how much.
_FREE_SHARE = {"cpu": 0.5, "cuda": 0.9}


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's part of a pass.

    tokens: [n] new tokens, fed at positions len(slots) - n ... len(slots) - 1.
    slots: [context] the slot of every position, the new ones included.
    num_logits: logits are wanted for the last `num_logits` new tokens, 0 <= num_logits <= n.
    """

    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    num_logits: int


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
    """

    def __init__(
        self, model: Any, pool: KvPool, *, name: str, tokenizer_json: str, chat_template: str | None
    ) -> None:
        self._model = model
        self.pool = pool
        self.name = name
        self.tokenizer_json = tokenizer_json
        self.chat_template = chat_template
        self.device: torch.device = pool.keys[0].device
        self.dtype: torch.dtype = pool.keys[0].dtype
        config = model.config.get_text_config()
        self.max_context: int = _max_context(config)
        self.vocab_size = _tokenizer_size(tokenizer_json)
        self.eos_ids = _as_ids(getattr(model.generation_config, "eos_token_id", None) or config.eos_token_id)
        self.bos_id: int | None = config.bos_token_id
        self._heads_per_kv = config.num_attention_heads // pool.keys[0].shape[1]

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
        native: bool = True,
    ) -> TargetModel:
        """Loads a model by folder or hub name.

        Args:
            name_or_path: a folder that transformers can load, or a name on its hub.
            device: "cpu", "cuda" or "cuda:N".
            dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the device
                computes in it, else float32.
            num_slots: tokens that the pool holds; overrides `kv_cache_bytes`.
            kv_cache_bytes: size of the pool; None takes a share of the free memory.
            max_sessions: the pool chosen from free memory is no larger than this many whole contexts.
            native: use compiled linear layers where the machine has a C compiler (CPU, float32).

        Raises:
            SpecwireError: UNSUPPORTED_MODEL for a model that cannot roll back or does not attend through the
                interface; BAD_REQUEST for a device or dtype that is not there.
        """
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        target_device, target_dtype = _device(device), _dtype(dtype, device)
        AttentionInterface.register(_ATTENTION, attend)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=target_dtype, attn_implementation=_ATTENTION
        )
        model.eval().to(target_device)
        if target_device.type == "cpu" and native:
            kernel = load_kernel(cache_dir())
            if kernel is not None:
                pack_linears(model, kernel)
        layers = _layer_shapes(model.config.get_text_config())
        if num_slots is None:
            each = slot_bytes(layers, target_dtype)
            if kv_cache_bytes is None:
                share = _FREE_SHARE[target_device.type] * free_memory_bytes(target_device)
                kv_cache_bytes = min(
                    int(share), each * max_sessions * _max_context(model.config.get_text_config())
                )
            num_slots = kv_cache_bytes // each
        pool = KvPool(layers, num_slots, dtype=target_dtype, device=target_device)
        return cls(
            model,
            pool,
            name=name_or_path,
            tokenizer_json=_tokenizer_json(name_or_path, tokenizer),
            chat_template=tokenizer.chat_template,
        )

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass over all segments.

        Returns:
            [sum of num_logits, vocab_size] in the model's dtype, on the device, segment after segment. Ids
            that the tokenizer does not know are cut off; ids that the model does not know are -inf.
        """
        tokens, positions, keep, layout = self._prepare(segments)
        logits: torch.Tensor = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            cache=_SlotCache(self.pool, layout.write),
            use_cache=False,
            logits_to_keep=keep,
            specwire_pass=layout,
        ).logits[0]
        missing = self.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def warm_up(self) -> None:
        """Runs small passes, so that the first session does not pay for first-time work."""
        slots = self.pool.allocate(min(16, self.pool.num_slots))
        try:
            for num_new in (len(slots), 1):
                self.forward([Segment(np.zeros(num_new, dtype=np.int64), slots, 1)])
        finally:
            self.pool.release(slots)

    def _prepare(
        self, segments: Sequence[Segment]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PassLayout]:
        """Tokens [T], positions [T], rows of wanted logits [N], layout; all in one copy to the device."""
        new = [len(segment.tokens) for segment in segments]
        contexts = [len(segment.slots) for segment in segments]
        ends = np.cumsum(new)
        plans = plan_groups(new, contexts)
        arrays = [
            np.concatenate([segment.tokens for segment in segments]),
            np.concatenate([np.arange(c - n, c) for n, c in zip(new, contexts, strict=True)]),
            np.concatenate([s.slots[c - n :] for s, n, c in zip(segments, new, contexts, strict=True)]),
            np.concatenate([np.arange(e - s.num_logits, e) for s, e in zip(segments, ends, strict=True)]),
        ]
        runs: list[int | None] = []
        in_order = True
        unpad = np.empty(ends[-1], dtype=np.int64)
        offset = 0
        expected = 0
        for plan in plans:
            members = list(plan.members)
            alone = segments[members[0]] if len(members) == 1 else None
            runs.append(int(alone.slots[0]) if alone is not None and is_run(alone.slots) else None)
            first = np.array([contexts[i] - new[i] for i in members])
            rows = np.empty((len(members), plan.num_new), dtype=np.int64)
            gather = np.full((len(members), plan.context), self.pool.padding_slot, dtype=np.int64)
            for line, i in enumerate(members):
                start = ends[i] - new[i]
                in_order &= new[i] == plan.num_new and start == expected
                expected = ends[i]
                rows[line] = np.minimum(np.arange(start, start + plan.num_new), ends[i] - 1)
                gather[line, : contexts[i]] = segments[i].slots
                unpad[start : ends[i]] = offset + line * plan.num_new + np.arange(new[i])
            offset += rows.size
            arrays += [first, rows.ravel(), gather.ravel() if runs[-1] is None else gather[:0].ravel()]
        arrays.append(unpad)
        parts = iter(self._to_device(arrays))
        tokens, positions, write, keep = next(parts), next(parts), next(parts), next(parts)
        whole = len(plans) == 1 and in_order
        groups = []
        for plan, run in zip(plans, runs, strict=True):
            first_dev, rows_dev, gather_dev = next(parts), next(parts), next(parts)
            uniform = plan.num_new == 1 and all(contexts[i] == plan.context for i in plan.members)
            groups.append(
                Group(
                    batch=len(plan.members),
                    num_new=plan.num_new,
                    context=plan.context,
                    rows=None if whole else rows_dev,
                    gather=gather_dev if run is None else None,
                    first_slot=run or 0,
                    mask=None
                    if uniform
                    else causal_mask(first_dev, plan.num_new, plan.context, self._heads_per_kv, self.dtype),
                )
            )
        layout = PassLayout(write=write, groups=tuple(groups), unpad=None if in_order else next(parts))
        return tokens, positions, keep, layout

    def _to_device(self, arrays: Sequence[NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
        flat = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
        if self.device.type != "cpu":
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        return torch.split(flat, [len(array) for array in arrays])


def _layer_shapes(config: Any) -> list[LayerShape]:
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [LayerShape(num_kv_heads, dim, dim)] * config.num_hidden_layers


def _max_context(config: Any) -> int:
    return int(config.max_position_embeddings)


def _tokenizer_size(tokenizer_json: str) -> int:
    return 1 + max(Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True).values())


def _as_ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _device(device: str) -> torch.device:
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SpecwireError(FaultKind.BAD_REQUEST, "This machine has no CUDA device.", "Use --device cpu.")
    return chosen


def _dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        native = not device.startswith("cpu") or has_bfloat16_arithmetic()
        return torch.bfloat16 if native else torch.float32
    if dtype not in _DTYPES:
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"There is no dtype {dtype!r}.", f"Use auto, {', '.join(_DTYPES)}."
        )
    return _DTYPES[dtype]


def _tokenizer_json(name_or_path: str, tokenizer: Any) -> str:
    path = Path(name_or_path) / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return str(tokenizer.backend_tokenizer.to_str())
