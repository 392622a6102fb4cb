"""The prefix cache against a naive one: the right slots, none lost, none used twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.kv_pool import KvPool, LayerShape
from cloud_verifier.prefix_cache import PrefixCache


def make(num_slots: int = 64) -> tuple[KvPool, PrefixCache]:
    pool = KvPool([LayerShape(1, 1, 1)], num_slots)
    return pool, PrefixCache(pool)


def remember(pool: KvPool, cache: PrefixCache, tokens: list[int]) -> np.ndarray:
    """A session that computes `tokens` alone, is remembered, and ends."""
    slots = pool.allocate(len(tokens))
    cache.insert(tokens, slots)
    pool.release(slots)
    return slots


def test_nothing_is_known_at_first():
    _, cache = make()
    assert cache.match([1, 2, 3]).size == 0


def test_a_whole_prefix_and_a_part_of_it_are_found():
    pool, cache = make()
    slots = remember(pool, cache, [1, 2, 3, 4])
    assert list(cache.match([1, 2, 3, 4, 5])) == list(slots)
    assert list(cache.match([1, 2, 9])) == list(slots[:2])
    assert cache.match([2, 3]).size == 0
    assert cache.num_hit_tokens == 6


def test_sequences_that_part_share_what_they_have_in_common():
    pool, cache = make()
    first = remember(pool, cache, [1, 2, 3, 4])
    second = remember(pool, cache, [1, 2, 7, 8])
    assert cache.num_slots == 6
    assert list(cache.match([1, 2, 7, 8])) == [*first[:2], *second[2:]]
    assert list(cache.match([1, 2, 3, 4])) == list(first)


def test_what_is_already_known_keeps_its_slots():
    pool, cache = make()
    first = remember(pool, cache, [1, 2, 3])
    second = remember(pool, cache, [1, 2, 3])
    assert list(cache.match([1, 2, 3])) == list(first)
    assert list(pool.references(second)) == [0, 0, 0]
    remember(pool, cache, [1, 2])
    assert cache.num_slots == 3


def test_owners_know_nothing_of_each_other():
    pool, cache = make()
    own = pool.allocate(3)
    cache.insert([1, 2, 3], own, "alice")
    assert cache.match([1, 2, 3], "bob").size == 0
    assert cache.match([1, 2, 3]).size == 0
    other = pool.allocate(3)
    cache.insert([1, 2, 3], other, "bob")
    assert list(cache.match([1, 2, 3], "alice")) == list(own)
    assert list(cache.match([1, 2, 3], "bob")) == list(other)
    for slots in (own, own, other, other):
        pool.release(slots)
    cache.evict(pool.num_slots)
    assert pool.num_free == pool.num_slots
    assert not cache._roots  # owners that have nothing are forgotten too


def test_tokens_without_slots_are_refused():
    _, cache = make()
    with pytest.raises(ValueError, match="slots"):
        cache.insert([1, 2], np.array([0]))


def test_the_longest_unused_goes_first():
    pool, cache = make(8)
    old, used = remember(pool, cache, [1, 2, 3]), remember(pool, cache, [4, 5, 6])
    pool.release(cache.match([1, 2, 3]))  # now the other one is older
    cache.evict(1)
    assert pool.num_free == 5
    assert list(cache.match([1, 2, 3])) == list(old)
    assert cache.match([4, 5, 6]).size == 0
    assert list(pool.references(used)) == [0, 0, 0]


def test_what_a_session_reads_goes_last_and_stays_in_use():
    pool, cache = make(8)
    remember(pool, cache, [1, 2, 3])
    read = cache.match([1, 2, 3])
    remember(pool, cache, [4, 5, 6])
    cache.evict(3)
    assert cache.match([4]).size == 0
    cache.evict(8)
    assert cache.num_slots == 0
    assert list(pool.references(read)) == [1, 1, 1]
    pool.release(read)
    assert pool.num_free == 8


def test_the_pool_takes_back_remembered_slots_when_it_is_full():
    pool, cache = make(6)
    pool.reclaim = cache.evict
    remember(pool, cache, [1, 2, 3, 4])
    assert len(pool.allocate(5)) == 5


STEP = st.tuples(
    st.sampled_from(["open", "open", "remember", "close", "evict"]),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(0, 5),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_sessions_come_and_go_and_every_slot_holds_the_right_tokens(steps):
    pool, cache = make(48)
    pool.reclaim = cache.evict
    content: dict[int, tuple[int, ...]] = {}  # slot -> the prefix whose last token it holds
    known: set[tuple[int, ...]] = {()}  # every prefix ever remembered, while nothing was evicted
    evicted = False
    sessions: list[tuple[list[int], np.ndarray]] = []
    for action, tokens, number in steps:
        if action == "open":
            found = cache.match(tokens)
            assert [content[slot] for slot in found.tolist()] == [
                tuple(tokens[: i + 1]) for i in range(len(found))
            ]
            best = max(i for i in range(len(tokens) + 1) if tuple(tokens[:i]) in known)
            assert len(found) <= best if evicted else len(found) == best
            missing = len(tokens) - len(found)
            if sum(len(slots) for _, slots in sessions) + len(tokens) > pool.num_slots:
                pool.release(found)
                continue
            evicted |= missing > pool.num_free
            new = pool.allocate(missing)
            read = {slot for _, slots in sessions for slot in slots.tolist()} | set(found.tolist())
            assert read.isdisjoint(new.tolist())
            content.update((slot, tuple(tokens[: len(found) + i + 1])) for i, slot in enumerate(new.tolist()))
            sessions.append((tokens, np.concatenate((found, new))))
        elif action == "remember" and sessions:
            written, slots = sessions[number % len(sessions)]
            cache.insert(written, slots)
            known |= {tuple(written[: i + 1]) for i in range(len(written))}
        elif action == "close" and sessions:
            pool.release(sessions.pop(number % len(sessions))[1])
        elif action == "evict":
            before = pool.num_free
            cache.evict(number)
            assert pool.num_free >= before + number or cache.num_slots == 0
            evicted = True
    for _, slots in sessions:
        pool.release(slots)
    assert pool.num_used == cache.num_slots
    cache.evict(pool.num_slots)
    assert pool.num_free == pool.num_slots
