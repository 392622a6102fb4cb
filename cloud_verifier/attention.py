"""Attention of one packed pass, session by session, over the slot pool.

A pass is one row of T tokens that belong to many sessions; its layout (`cloud_verifier.pass_layout`) is built
once and serves every layer. Sessions of similar size form a group: their keys are gathered into
[B, S, kv_heads, D], their queries are padded to [B, kv_heads, n * g, D] (the g query heads of one key-value
head become rows, so that keys are never repeated), and one call does the group. Work thus grows with the sum
of the sessions' lengths, never with their product.

The call is torch's scaled dot-product attention with a dense mask, or FlexAttention, which skips the blocks
that nobody sees: on CUDA the padding of short sessions then costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from shared.faults import FaultKind, SpecwireError

# Arguments that some models give to their attention and that this one does not honour.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")

FlexFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which slots of their own session a group's new tokens see.

    All see the context before the block. Inside the block, token r sees tokens 0 ... r, or, where the block
    is a tree, its ancestors and itself.
    """

    first: torch.Tensor  # [B] position, in the member's slots, of its first new token
    num_new: int  # n
    context: int  # S
    ancestors: torch.Tensor | None  # [B, n, n] bool; None: every block is a chain

    def __call__(self, member: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Elementwise over broadcast index tensors.

        A padded row of a chain sees all that the last row sees and more, never nothing, so that no softmax
        runs over an empty set.
        """
        inside = slot - self.first[member]  # index among the new tokens, negative in the context
        if self.ancestors is None:
            return inside <= row
        known = self.ancestors[member, row, inside.clamp(0, self.num_new - 1)]
        return (inside < 0) | (known & (inside < self.num_new))

    def dense_mask(self, heads_per_kv: int, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, n * g, S]: 0 where a query row sees a slot, -inf elsewhere."""
        device = self.first.device
        member = torch.arange(len(self.first), device=device)[:, None, None]
        row = torch.arange(self.num_new, device=device)[None, :, None]
        slot = torch.arange(self.context, device=device)[None, None, :]
        visible = self(member, row, slot)  # [B, n, S]
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return mask.repeat_interleave(heads_per_kv, dim=1)[:, None]

    def block_mask(self, heads_per_kv: int) -> BlockMask:
        """The same for FlexAttention, whose query rows are n * g."""

        def visible(
            member: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            return self(member, query // heads_per_kv, slot)

        rows = self.num_new * heads_per_kv
        return create_block_mask(
            visible, len(self.first), None, rows, self.context, device=str(self.first.device)
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions that share one call of attention."""

    batch: int  # B
    num_new: int  # n
    context: int  # S
    rows: torch.Tensor | None  # [B * n] rows of the pass; padding repeats a member's own. None: all, in order
    gather: torch.Tensor | None  # [B * S] slots; None: the S slots from first_slot on, read in place
    first_slot: int
    mask: torch.Tensor | None = None  # [B, 1, n * g, S] for scaled dot-product attention
    blocks: BlockMask | None = None  # for FlexAttention; without a mask everything is visible


class Scratch:
    """Memory for gathered keys and values, used again by every group, layer and pass.

    Fresh memory of this size would come from the system each time, page by page, and cost more than the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def gather(self, purpose: str, store: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows `slots` of `store`; valid until the next gather for the same purpose."""
        num = len(slots) * store[0].numel()
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < num:
            buffer = self._buffers[purpose] = store.new_empty(num)
        rows = buffer[:num].view(len(slots), *store.shape[1:])
        return torch.index_select(store, 0, slots, out=rows)


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Where the pass's tokens are written, and what they read."""

    write: torch.Tensor  # [T] slots of the new tokens
    groups: tuple[Group, ...]
    scratch: Scratch
    unpad: torch.Tensor | None  # [T] row of the groups' outputs, one after another; None: already in order
    flex: FlexFunction | None = None  # None: scaled dot-product attention


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    specwire_pass: PassLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the model calls in every layer.

    Args:
        module: the model's attention layer; not used.
        query: [1, heads, T, D].
        key: the layer's store in the pool, [num_slots + 1, kv_heads, D].
        value: likewise.
        attention_mask: not used, the layout has its own.
        scaling: factor of the scores; None is 1/sqrt(D).
        specwire_pass: the layout, which the model hands through from its own keyword arguments.
        kwargs: whatever else the model hands over.

    Returns:
        [1, T, heads, D], and no weights.
    """
    if specwire_pass is None:
        raise unsupported("it does not hand keyword arguments through to its attention")
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise unsupported(f"its attention uses `{name}`")
    num_heads, num_rows = query.shape[1:3]
    packed = query[0].transpose(0, 1)  # [T, heads, D]
    outputs = [
        _attend_group(group, packed, key, value, scaling, specwire_pass) for group in specwire_pass.groups
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if specwire_pass.unpad is not None:
        output = output.index_select(0, specwire_pass.unpad)
    return output.view(1, num_rows, num_heads, -1), None


def _attend_group(
    group: Group,
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    layout: PassLayout,
) -> torch.Tensor:
    """[B * n, heads * D] for the rows of `group`."""
    batch, num_new, context = group.batch, group.num_new, group.context
    num_heads, dim = packed.shape[1:]
    num_kv_heads = key.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    if group.rows is not None:
        packed = packed.index_select(0, group.rows)
    # [B, kv, n * g, D]
    folded = packed.reshape(batch, num_new, num_kv_heads, heads_per_kv, dim).transpose(1, 2)
    folded = folded.reshape(batch, num_kv_heads, num_new * heads_per_kv, dim)
    if group.gather is None:
        keys = key[group.first_slot : group.first_slot + context]
        values = value[group.first_slot : group.first_slot + context]
    else:
        keys = layout.scratch.gather("keys", key, group.gather)
        values = layout.scratch.gather("values", value, group.gather)
    keys = keys.view(batch, context, num_kv_heads, -1).transpose(1, 2)
    values = values.view(batch, context, num_kv_heads, -1).transpose(1, 2)
    if layout.flex is not None:
        output = layout.flex(folded, keys, values, block_mask=group.blocks, scale=scaling)
    else:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask, scale=scaling)
    output = output.view(batch, num_kv_heads, num_new, heads_per_kv, -1).transpose(1, 2)
    return output.reshape(batch * num_new, -1)


def unsupported(why: str, remedy: str = "") -> SpecwireError:
    """The fault of a target that cannot be served."""
    return SpecwireError(
        FaultKind.UNSUPPORTED_MODEL,
        f"This target model is not supported: {why}.",
        remedy
        or "Choose a decoder with plain causal attention in every layer, such as Llama, Qwen3 or Mistral.",
    )
