"""The slots: references, runs, and what happens when they are out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.kv_pool import KvPool, LayerShape, slot_bytes
from shared.faults import FaultKind, SpecwireError

LAYERS = [LayerShape(2, 4, 4), LayerShape(1, 8, 6)]


def make(num_slots: int) -> KvPool:
    return KvPool(LAYERS, num_slots)


def test_stores_have_one_row_a_slot_and_a_padding_row_of_zeros():
    pool = KvPool(LAYERS, 5, dtype=torch.bfloat16)
    assert [tuple(keys.shape) for keys in pool.keys] == [(6, 2, 4), (6, 1, 8)]
    assert [tuple(values.shape) for values in pool.values] == [(6, 2, 4), (6, 1, 6)]
    assert pool.keys[0].dtype == torch.bfloat16
    assert pool.padding_slot == 5
    assert all(not store[pool.padding_slot].any() for store in pool.keys + pool.values)
    assert pool.slot_bytes == slot_bytes(LAYERS, torch.bfloat16) == 2 * (2 * 8 + 14)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_slots"):
        make(0)


def test_counts():
    pool = make(10)
    first, second = pool.allocate(3), pool.allocate(4)
    pool.release(first)
    assert (pool.num_free, pool.num_used, pool.max_used, pool.num_allocated_total) == (6, 4, 7, 7)
    assert pool.usage == pytest.approx(0.4)
    pool.release(second)
    assert pool.num_free == 10


def test_a_full_pool_is_overloaded_and_says_when_to_retry():
    pool = make(4)
    pool.allocate(3)
    with pytest.raises(SpecwireError) as caught:
        pool.allocate(2)
    assert caught.value.kind == FaultKind.OVERLOADED
    assert caught.value.retry_after_ms > 0
    assert pool.num_free == 1


def test_reclaim_is_asked_for_what_is_missing_before_failing():
    pool = make(4)
    held = pool.allocate(4)
    asked = []

    def reclaim(missing: int) -> None:
        asked.append(missing)
        pool.release(held[:missing])

    pool.reclaim = reclaim
    assert sorted(pool.allocate(2)) == sorted(held[:2])
    assert asked == [2]


def test_growing_after_the_last_slot_stays_contiguous():
    pool = make(20)
    slots = pool.allocate(5)
    for _ in range(3):
        slots = np.concatenate((slots, pool.allocate(4, after=int(slots[-1]))))
    assert list(slots) == list(range(int(slots[0]), int(slots[0]) + 17))


def test_a_hint_that_cannot_be_followed_is_not_fatal():
    pool = make(6)
    slots = pool.allocate(3)
    other = pool.allocate(2)
    assert len(np.unique(np.concatenate((slots, other, pool.allocate(1, after=int(slots[-1])))))) == 6


def test_one_run_is_chosen_where_one_fits_and_the_smallest_that_does():
    pool = make(12)
    slots = pool.allocate(12)
    pool.release(slots[[1, 2, 3, 4, 6, 7, 8, 10]])
    assert list(pool.allocate(3)) == [6, 7, 8]
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 10]


@pytest.mark.parametrize("slots", [[0, 0], [5], [-1], [99]])
def test_releasing_what_is_not_held_is_an_error_and_changes_nothing(slots):
    pool = make(8)
    held = pool.allocate(3)
    with pytest.raises(SpecwireError):
        pool.release(np.array(slots))
    assert pool.num_free == 5
    assert list(pool.references(held)) == [1, 1, 1]


def test_releasing_twice_is_an_error():
    pool = make(8)
    held = pool.allocate(3)
    pool.release(held)
    with pytest.raises(SpecwireError):
        pool.release(held)


def test_a_free_slot_cannot_be_retained():
    with pytest.raises(SpecwireError):
        make(8).retain(np.array([1]))


def test_a_shared_slot_is_free_when_the_last_holder_lets_go():
    pool = make(4)
    slots = pool.allocate(2)
    pool.retain(slots)
    pool.release(slots)
    assert pool.num_free == 2
    pool.release(slots)
    assert pool.num_free == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 7)), max_size=60)
)
def test_references_agree_with_a_naive_count(steps):
    pool = make(16)
    counts = dict.fromkeys(range(16), 0)
    held: list[np.ndarray] = []
    for action, number in steps:
        if action == "allocate" and number <= pool.num_free:
            slots = pool.allocate(number)
            assert len(set(slots.tolist())) == number
            assert all(counts[slot] == 0 for slot in slots.tolist())
            held.append(slots)
        elif action == "retain" and held:
            slots = held[number % len(held)]
            pool.retain(slots)
            held.append(slots)
        elif action == "release" and held:
            slots = held.pop(number % len(held))
            pool.release(slots)
            for slot in slots.tolist():
                counts[slot] -= 1
            continue
        else:
            continue
        for slot in slots.tolist():
            counts[slot] += 1
        assert list(pool.references(np.arange(16))) == list(counts.values())
        assert pool.num_free == sum(count == 0 for count in counts.values())
    for slots in held:
        pool.release(slots)
    assert pool.num_free == 16
