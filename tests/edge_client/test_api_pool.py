"""Which context a prompt gets, who waits, and the order of turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from edge_client.api.pool import Pool, Prompt
from edge_client.api.turnstile import Turnstile
from shared.faults import FaultKind, SpecwireError

PREFIX = tuple(range(100, 150))


class FakeConversation:
    """A session that holds what it is told to hold."""

    def __init__(self, logprobs: int) -> None:
        self.logprobs = logprobs
        self.history: tuple[int, ...] = ()
        self.closed = False

    async def __aexit__(self, *details: object) -> None:
        self.closed = True


def letters() -> Tokenizer:
    """One token a letter; ids are code points."""
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def pool(size: int = 2, max_waiting: int = 8) -> Pool:
    return Pool(FakeConversation, letters(), size, max_waiting)  # type: ignore[arg-type]


async def use(pool: Pool, prompt: Prompt, answer: tuple[int, ...] | None, text: str = "", logprobs: int = 0):
    """One answer; `answer` None ends the session, as a stop string does."""
    async with pool.lease(prompt, logprobs) as lease:
        conversation = lease.context.conversation
        conversation.history = (*lease.tokens, *answer) if answer is not None else ()
        lease.context.text = prompt.text + text if prompt.text is not None and answer is not None else None
        return lease


async def test_a_next_turn_continues_its_session() -> None:
    contexts = pool()
    first = await use(contexts, Prompt(PREFIX), (1, 2))
    second = await use(contexts, Prompt((*PREFIX, 1, 2, 3)), (4,))
    assert second.context is first.context
    assert second.num_reused == len(PREFIX) + 2
    assert second.tokens == (*PREFIX, 1, 2, 3)


async def test_an_answer_keeps_its_own_tokens() -> None:
    """Its text encodes to other tokens: the text decides, and the session's tokens stay."""
    contexts = pool()
    await use(contexts, Prompt((65, 66), "AB"), (200, 201), "xy")
    turn = await use(contexts, Prompt((65, 66, 120, 121, 67), "ABxyC"), ())
    assert turn.tokens == (65, 66, 200, 201, 67)
    assert turn.num_reused == 4


async def test_two_chats_with_one_beginning_do_not_take_each_others_session() -> None:
    contexts = pool(3)
    first = await use(contexts, Prompt((*PREFIX, 1)), (2,))
    second = await use(contexts, Prompt((*PREFIX, 9)), (8,))
    assert second.context is not first.context
    assert (await use(contexts, Prompt((*PREFIX, 1, 2, 3)), ())).context is first.context
    assert (await use(contexts, Prompt((*PREFIX, 9, 8, 7)), ())).context is second.context


async def test_regenerating_reads_nothing_again() -> None:
    contexts = pool()
    first = await use(contexts, Prompt(PREFIX), (1, 2))
    again = await use(contexts, Prompt(PREFIX), (3,))
    assert again.context is first.context
    assert again.num_reused == len(PREFIX) - 1


async def test_after_a_stop_string_the_draft_still_knows_the_text() -> None:
    contexts = pool()
    first = await use(contexts, Prompt(PREFIX), None)
    turn = await use(contexts, Prompt((*PREFIX, *range(60))), ())
    assert turn.context is first.context
    assert turn.num_reused == len(PREFIX)


async def test_the_context_unused_for_longest_is_replaced() -> None:
    contexts = pool(2)
    old = await use(contexts, Prompt((1, 2)), (3,))
    young = await use(contexts, Prompt((4, 5)), (6,))
    third = await use(contexts, Prompt((7, 8)), (9,))
    await asyncio.sleep(0)
    assert old.context.conversation.closed
    assert not young.context.conversation.closed
    assert third.num_reused == 0


async def test_logprobs_are_a_sessions_own() -> None:
    contexts = pool()
    first = await use(contexts, Prompt(PREFIX), (1,))
    second = await use(contexts, Prompt((*PREFIX, 1, 2)), (), logprobs=3)
    assert second.context is not first.context
    assert second.context.conversation.logprobs == 3


async def test_a_busy_session_is_nobody_elses() -> None:
    contexts = pool(2)
    first = await use(contexts, Prompt(PREFIX), (1,))
    async with (
        contexts.lease(Prompt((*PREFIX, 1, 2)), 0) as one,
        contexts.lease(Prompt((*PREFIX, 1, 3)), 0) as two,
    ):
        assert one.context is first.context
        assert two.context is not one.context


async def test_waiting_is_first_come_first_served_and_bounded() -> None:
    contexts = pool(1, max_waiting=3)
    order: list[int] = []

    async def ask(number: int) -> None:
        async with contexts.lease(Prompt((number,)), 0):
            order.append(number)

    async with contexts.lease(Prompt((99,)), 0):
        waiting = [asyncio.create_task(ask(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(SpecwireError) as caught:
            await ask(3)
        assert caught.value.kind is FaultKind.OVERLOADED
        assert caught.value.retry_after_ms > 0
        waiting[0].cancel()
    await asyncio.wait(waiting)
    assert order == [1, 2]
    assert contexts.num_busy == contexts.num_waiting == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_tokens_always_spell_the_prompt(turns: list[tuple[int, bool]]) -> None:
    """Whatever is reused, what is continued is the prompt that was asked for."""

    async def talk() -> None:
        contexts = pool(2)
        texts = ["A", "AB", "C", "CA"]
        for index, (chat, stopped) in enumerate(turns):
            text = texts[chat]
            prompt = Prompt(tuple(map(ord, text)), text)
            lease = await use(contexts, prompt, None if stopped else (ord("x"),), "x")
            assert "".join(map(chr, lease.tokens)) == text
            assert 0 <= lease.num_reused < len(lease.tokens)
            texts[chat] = f"{text}x{'DE'[index % 2]}"

    asyncio.run(talk())


def test_turns_are_given_in_order() -> None:
    turnstile, order = Turnstile(), []
    threads: list[threading.Thread] = []

    def take(number: int) -> None:
        with turnstile.turn():
            order.append(number)

    with turnstile.turn():
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(turnstile._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_turn_ends_with_an_error_too() -> None:
    turnstile = Turnstile()

    def failing() -> Iterator[None]:
        with turnstile.turn():
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    with turnstile.turn():
        pass
