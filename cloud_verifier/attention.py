"""Attention of one packed pass, session by session, over the slot pool.

A pass is one row of T tokens that belong to many sessions. Its layout says which slots each session reads;
it is built once a pass and serves every layer. Sessions of similar size form a group: their keys are gathered
into [B, S, kv_heads, D], their queries are padded to [B, kv_heads, n * g, D] (the g query heads of one
key-value head become rows, so that keys are never repeated), and one call of scaled dot-product attention
does the group. Work thus grows with the sum of the sessions' lengths, never with their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from shared.faults import FaultKind, SpecwireError

# Rough costs on the CPU, in microseconds and per layer: of one more call, of reading one more slot, and of
# scoring one more (token, slot) pair. Only their ratios matter: they decide which sessions share a call.
_CALL_COST = 60.0
_SLOT_COST = 0.15
_PAIR_COST = 0.05

# Arguments that some models give to their attention and that this one does not honour.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")


class PassSegment(Protocol):
    """What a layout needs to know of a session's part of the pass."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def slots(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Sessions that share one call of attention; host side."""

    members: tuple[int, ...]  # indices of segments
    num_new: int  # n: new tokens of the longest member
    context: int  # S: context of the longest member


@dataclass(frozen=True, slots=True)
class Group:
    """A group as one call of attention needs it; device side."""

    batch: int  # B
    num_new: int  # n
    context: int  # S
    rows: (
        torch.Tensor | None
    )  # [B * n] rows of the pass, padding repeats a member's own; None: all rows in order
    gather: torch.Tensor | None  # [B * S] slots; None: the S slots from first_slot on, read in place
    first_slot: int
    mask: torch.Tensor | None  # [B, 1, n * g, S] added to the scores; None: everything is visible


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Where the pass's tokens are written, and what they read."""

    write: torch.Tensor  # [T] slots of the new tokens
    groups: tuple[Group, ...]
    unpad: torch.Tensor | None  # [T] row of the groups' outputs, one after another; None: already in order


def plan_groups(new: Sequence[int], contexts: Sequence[int]) -> list[GroupPlan]:
    """Which sessions share a call: neighbours in size, while padding costs less than another call."""

    def cost(batch: int, num_new: int, context: int) -> float:
        return _CALL_COST + batch * context * (_SLOT_COST + num_new * _PAIR_COST)

    plans: list[GroupPlan] = []
    for index in sorted(range(len(new)), key=lambda i: (new[i], contexts[i])):
        num_new, context = new[index], contexts[index]
        if plans:
            last = plans[-1]
            size = len(last.members)
            joint_new, joint_context = max(last.num_new, num_new), max(last.context, context)
            apart = cost(size, last.num_new, last.context) + cost(1, num_new, context)
            if cost(size + 1, joint_new, joint_context) <= apart:
                plans[-1] = GroupPlan((*last.members, index), joint_new, joint_context)
                continue
        plans.append(GroupPlan((index,), num_new, context))
    return plans


def is_run(slots: NDArray[np.int64]) -> bool:
    """Whether `slots` are consecutive."""
    return int(slots[-1] - slots[0]) == len(slots) - 1 and bool(np.all(slots[1:] - slots[:-1] == 1))


def causal_mask(
    first: torch.Tensor, num_new: int, context: int, heads_per_kv: int, dtype: torch.dtype
) -> torch.Tensor:
    """[B, 1, num_new * g, context]: 0 where new token r may see slot s, -inf elsewhere.

    `first` [B] is the position of each member's first new token. A padded row sees all that the last one sees
    and more, never nothing, so that no softmax runs over an empty set.
    """
    device = first.device
    last_visible = first[:, None] + torch.arange(num_new, device=device)  # [B, n]
    hidden = torch.arange(context, device=device) > last_visible[:, :, None]  # [B, n, S]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(heads_per_kv, dim=1)[:, None]


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
        raise _unsupported("it does not hand keyword arguments through to its attention")
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise _unsupported(f"its attention uses `{name}`")
    _, num_heads, num_rows, _ = query.shape
    packed = query[0].transpose(0, 1)  # [T, heads, D]
    outputs = [_attend_group(group, packed, key, value, scaling) for group in specwire_pass.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if specwire_pass.unpad is not None:
        output = output.index_select(0, specwire_pass.unpad)
    return output.view(1, num_rows, num_heads, -1), None


def _attend_group(
    group: Group, packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
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
        keys = key.index_select(0, group.gather)
        values = value.index_select(0, group.gather)
    output = F.scaled_dot_product_attention(
        folded,
        keys.view(batch, context, num_kv_heads, -1).transpose(1, 2),
        values.view(batch, context, num_kv_heads, -1).transpose(1, 2),
        attn_mask=group.mask,
        scale=scaling,
    )
    output = output.view(batch, num_kv_heads, num_new, heads_per_kv, -1).transpose(1, 2)
    return output.reshape(batch * num_new, -1)


def _unsupported(why: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNSUPPORTED_MODEL,
        f"This target model is not supported: {why}.",
        "Choose a decoder with plain causal attention in every layer, such as Llama, Qwen3 or Mistral.",
    )
