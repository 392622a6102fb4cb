"""From segments to one pass: which rows, which slots, which sessions share a call of attention.

Everything that depends on the batch is worked out here, once, on the host, and goes to the device in one
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.attention import FlexFunction, Group, PassLayout, Scratch, Visibility

# Rough costs on a CPU, in microseconds and per layer: of one more call, of reading one more slot, and of
# scoring one more (token, slot) pair. Only their ratios matter: they decide which sessions share a call.
_CALL_COST = 60.0
_SLOT_COST = 0.15
_PAIR_COST = 0.05


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's part of a pass.

    tokens: [n] new tokens, n >= 1, fed at positions len(slots) - n ... len(slots) - 1.
    slots: [context] the slot of every position, the new ones included; they are distinct.
    num_logits: logits are wanted for the last `num_logits` new tokens, 0 <= num_logits <= n.
    parents: [n] for a tree of tokens: index among the new tokens of each one's parent, smaller than its own,
        or -1 where it follows the context. A token then sees the context, its ancestors and itself. None: a
        chain.
    positions: [n] absolute positions; None: consecutive, or, in a tree, one more than the parent's.
    """

    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    num_logits: int
    parents: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None

    @property
    def first(self) -> int:
        """Position of the first new token in `slots`."""
        return len(self.slots) - len(self.tokens)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Sessions that share one call of attention."""

    members: tuple[int, ...]  # indices of segments
    num_new: int  # new tokens of the longest member
    context: int  # context of the longest member


@dataclass(frozen=True, slots=True)
class PassSpec:
    """What the layout needs to know of the model."""

    padding_slot: int
    heads_per_kv: int
    dtype: torch.dtype
    device: torch.device
    flex: FlexFunction | None = None
    scratch: Scratch = field(default_factory=Scratch)


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """The model's inputs, on the device."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    keep: torch.Tensor  # [sum of num_logits] rows whose logits are wanted
    layout: PassLayout


@dataclass(slots=True)
class _Parcel:
    """Arrays that travel to the device as one."""

    arrays: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, array: NDArray[np.int64]) -> int:
        self.arrays.append(array.ravel())
        return len(self.arrays) - 1

    def send(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        flat = torch.from_numpy(np.concatenate(self.arrays, dtype=np.int64))
        if device.type != "cpu":
            flat = flat.pin_memory().to(device, non_blocking=True)
        return torch.split(flat, [len(array) for array in self.arrays])


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


def ancestors_of(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n, n] whether token c is token r, or above it.

    Raises:
        ValueError: where a parent is not an earlier token or -1.
    """
    above = np.eye(len(parents), dtype=bool)
    for token, parent in enumerate(parents.tolist()):
        if not -1 <= parent < token:
            raise ValueError(
                f"token {token} of a tree has parent {parent}; it must be -1 or an earlier token"
            )
        if parent >= 0:
            above[token] |= above[parent]
    return above


def prepare(segments: Sequence[Segment], spec: PassSpec) -> PreparedPass:
    """The inputs of one pass over `segments`."""
    new = [len(segment.tokens) for segment in segments]
    contexts = [len(segment.slots) for segment in segments]
    ends = np.cumsum(new, dtype=np.int64)
    starts = ends - np.array(new, dtype=np.int64)
    parcel = _Parcel()
    parcel.add(np.concatenate([segment.tokens for segment in segments]))
    parcel.add(np.concatenate([_positions(segment) for segment in segments]))
    parcel.add(np.concatenate([segment.slots[segment.first :] for segment in segments]))
    parcel.add(np.concatenate([np.arange(e - s.num_logits, e) for s, e in zip(segments, ends, strict=True)]))

    plans = plan_groups(new, contexts)
    order = [index for plan in plans for index in plan.members]
    padded = any(new[index] != plan.num_new for plan in plans for index in plan.members)
    in_order = not padded and order == list(range(len(segments)))
    whole = in_order and len(plans) == 1
    pending = [_add_group(parcel, plan, segments, starts, whole, spec.padding_slot) for plan in plans]
    if not in_order:
        parcel.add(_unpad(plans, new, starts))

    sent = parcel.send(spec.device)
    groups = tuple(group.finish(sent, spec) for group in pending)
    unpad = None if in_order else sent[-1]
    layout = PassLayout(write=sent[2], groups=groups, scratch=spec.scratch, unpad=unpad, flex=spec.flex)
    return PreparedPass(tokens=sent[0], positions=sent[1], keep=sent[3], layout=layout)


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    """A group whose arrays are in the parcel, by their index there."""

    plan: GroupPlan
    first: int
    rows: int | None
    gather: int | None
    first_slot: int
    ancestors: int | None
    all_visible: bool

    def finish(self, sent: Sequence[torch.Tensor], spec: PassSpec) -> Group:
        plan, batch = self.plan, len(self.plan.members)
        mask = blocks = None
        if not self.all_visible:
            shape = (batch, plan.num_new, plan.num_new)
            ancestors = None if self.ancestors is None else sent[self.ancestors].view(shape).bool()
            visible = Visibility(sent[self.first], plan.num_new, plan.context, ancestors)
            if spec.flex is not None:
                blocks = visible.block_mask(spec.heads_per_kv)
            else:
                mask = visible.dense_mask(spec.heads_per_kv, spec.dtype)
        return Group(
            batch=batch,
            num_new=plan.num_new,
            context=plan.context,
            rows=None if self.rows is None else sent[self.rows],
            gather=None if self.gather is None else sent[self.gather],
            first_slot=self.first_slot,
            mask=mask,
            blocks=blocks,
        )


def _add_group(
    parcel: _Parcel,
    plan: GroupPlan,
    segments: Sequence[Segment],
    starts: NDArray[np.int64],
    whole: bool,
    padding_slot: int,
) -> _PendingGroup:
    members = [segments[index] for index in plan.members]
    run = len(members) == 1 and _is_run(members[0].slots)
    gather = rows = ancestors = None
    if not run:
        slots = np.full((len(members), plan.context), padding_slot, dtype=np.int64)
        for line, member in zip(slots, members, strict=True):
            line[: len(member.slots)] = member.slots
        gather = parcel.add(slots)
    if not whole:
        offsets = np.arange(plan.num_new)
        last = np.array([len(member.tokens) - 1 for member in members])[:, None]
        rows = parcel.add(starts[list(plan.members)][:, None] + np.minimum(offsets, last))
    if any(member.parents is not None for member in members):
        ancestors = parcel.add(np.stack([_ancestors(member, plan.num_new) for member in members]))
    return _PendingGroup(
        plan=plan,
        first=parcel.add(np.array([member.first for member in members], dtype=np.int64)),
        rows=rows,
        gather=gather,
        first_slot=int(members[0].slots[0]) if run else 0,
        ancestors=ancestors,
        all_visible=plan.num_new == 1 and all(len(member.slots) == plan.context for member in members),
    )


def _ancestors(segment: Segment, num_new: int) -> NDArray[np.int64]:
    """[num_new, num_new]; padded rows repeat the last one, padded columns are seen by nobody."""
    num = len(segment.tokens)
    chain = np.arange(num, dtype=np.int64) - 1
    padded = np.zeros((num_new, num_new), dtype=np.int64)
    padded[:num, :num] = ancestors_of(chain if segment.parents is None else segment.parents)
    padded[num:] = padded[num - 1]
    return padded


def _positions(segment: Segment) -> NDArray[np.int64]:
    if segment.positions is not None:
        return segment.positions
    if segment.parents is None:
        return np.arange(segment.first, len(segment.slots), dtype=np.int64)
    depth = ancestors_of(segment.parents).sum(axis=1) - 1
    return np.asarray(segment.first + depth, dtype=np.int64)


def _unpad(plans: Sequence[GroupPlan], new: Sequence[int], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] for each row of the pass, its row in the groups' outputs laid one after another."""
    rows = np.empty(sum(new), dtype=np.int64)
    offset = 0
    for plan in plans:
        for index in plan.members:
            rows[starts[index] : starts[index] + new[index]] = offset + np.arange(new[index])
            offset += plan.num_new
    return rows


def _is_run(slots: NDArray[np.int64]) -> bool:
    """Whether `slots` are consecutive."""
    return int(slots[-1] - slots[0]) == len(slots) - 1 and bool(np.all(slots[1:] - slots[:-1] == 1))
