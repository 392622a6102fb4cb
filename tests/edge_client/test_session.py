"""Corner cases of a session's bookkeeping, on scripted streams; the real ones are in test_connection.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest

from edge_client.connection import Patience
from edge_client.session import DisconnectedError, RemoteSession, UnansweredError
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    DraftBlock,
    FinishReason,
    Generate,
    Notice,
    NoticeKind,
    Open,
    Opened,
    SamplingParams,
    TokenizerIdentity,
    Tokens,
    Verdict,
)

PROMPT = (1, 2, 3)
OPEN = Open(TokenizerIdentity("x", 99), PROMPT, SamplingParams(seed=5), "lattice", "token", 8, 50)
LOST = DisconnectedError(FaultKind.UNAVAILABLE, "Lost.", "Try again.")
UNKNOWN = SpecwireError(FaultKind.SESSION_UNKNOWN, "Never heard of it.")
DRAINING = Notice(NoticeKind.DRAINING, "Shutting down.")


class Script:
    """One stream: what it will say, in order, and what it was told."""

    def __init__(self, *messages: object, write_s: float = 0.0) -> None:
        self.messages = deque(messages)
        self.write_s = write_s
        self.has_steps = asyncio.Event()
        self.told: list[object] = []
        self.closed = False

    async def write(self, message: object) -> int:
        if self.closed:
            raise LOST
        self.told.append(message)
        if not isinstance(message, Open):
            self.has_steps.set()
        if self.write_s:
            await asyncio.sleep(self.write_s)
        return 10

    async def read(self) -> tuple[object, int]:
        if not self.messages:
            await asyncio.Event().wait()
        message = self.messages.popleft()
        await asyncio.sleep(0)
        if isinstance(message, DisconnectedError):
            self.closed = True
            raise message
        return message, 7

    def steps(self) -> list[tuple[str, int, int]]:
        """(kind, step, epoch) of all but Open."""
        return [(type(m).__name__, m.step, m.epoch) for m in self.told if not isinstance(m, Open)]


class Verifier:
    """Gives out the scripts in turn, at whatever address is asked."""

    def __init__(
        self, *scripts: Script | SpecwireError, addresses: tuple[str, ...] = ("a:1",), patience: float = 5.0
    ) -> None:
        self.addresses = addresses
        self.patience = Patience(answer=patience, reconnect=patience)
        self.notices: list[str] = []
        self.visited: list[str] = []
        self._scripts = deque(scripts)

    def notify(self, text: str) -> None:
        self.notices.append(text)

    async def connect(self, address: str, session_key: str) -> Script:
        self.visited.append(address)
        if not self._scripts:
            raise LOST
        script = self._scripts.popleft()
        if isinstance(script, SpecwireError):
            raise script
        return script

    def close_later(self, stream: Script) -> None:
        stream.closed = True


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: low)


def opened(step: int = 1, epoch: int = 0, length: int = 3, tokens: tuple[int, ...] = ()) -> Opened:
    return Opened("s", length, epoch, step, 8, tokens)


def block(base_len: int, *tokens: int, more: bool = False) -> DraftBlock:
    return DraftBlock(0, 0, base_len, tokens, b"payload", more)


async def session_on(verifier: Verifier, request: Open = OPEN) -> RemoteSession:
    return await RemoteSession(verifier, request).__aenter__()  # type: ignore[arg-type]


async def test_blocks_follow_open_at_once():
    script = Script(opened(), Verdict(1, 0, 2, (9,), 6))
    session = await session_on(Verifier(script))
    await session.send(block(3, 7, 8))
    assert script.told == [OPEN, DraftBlock(1, 0, 3, (7, 8), b"payload")]
    reply = await session.receive()
    assert reply.tokens == (7, 8, 9)
    assert session.committed == [1, 2, 3, 7, 8, 9]


async def test_blocks_of_an_ended_epoch_are_counted_as_waste_and_their_answers_ignored():
    script = Script(
        opened(),
        Verdict(1, 1, 0, (9,), 4),
        Verdict(2, 1, 0, (), 4, stale=True),
        Verdict(3, 1, 0, (), 4, stale=True),
        Verdict(4, 1, 1, (6,), 6),
    )
    session = await session_on(Verifier(script))
    for base in (3, 4, 5):
        await session.send(block(base, 7, more=True))
    assert (await session.receive()).tokens == (9,)
    assert session.num_unanswered == 0
    assert session.num_given_up == 2
    assert session.traffic.wasted_up_bytes == 20
    assert session.traffic.num_stale_blocks == 2
    await session.send(block(4, 5))
    assert (await session.receive()).tokens == (5, 6)
    assert session.num_given_up == 0
    assert script.steps()[-1] == ("DraftBlock", 4, 1)


async def test_a_block_that_is_given_up_on_its_way_is_waste_too():
    script = Script(opened(), Verdict(1, 1, 0, (9,), 4))
    session = await session_on(Verifier(script))
    await session.send(block(3, 7, more=True))
    script.write_s = 0.02
    sending = asyncio.create_task(session.send(block(4, 8)))
    await asyncio.sleep(0.01)
    await session.receive()
    assert await sending == 10
    assert session.num_given_up == 1
    assert session.traffic.wasted_up_bytes == 10
    assert session.traffic.num_stale_blocks == 1
    assert session.traffic.up_bytes == 30


async def test_only_blocks_are_waste_when_an_answer_is_stopped():
    script = Script(opened(), Tokens(1, 0, (7,), 4, last=False))
    session = await session_on(Verifier(script))
    await session.send(Generate(0, 0, 3, 4))
    await session.receive()
    session.give_up_pending()
    assert session.num_unanswered == 0
    assert session.traffic.wasted_up_bytes == session.traffic.num_stale_blocks == 0


async def test_a_finished_answer_gives_up_what_is_in_flight():
    script = Script(opened(), Verdict(1, 0, 1, (), 4, FinishReason.STOP), Tokens(3, 0, (), 6))
    session = await session_on(Verifier(script))
    await session.send(block(3, 7, more=True))
    await session.send(block(4, 8))
    assert (await session.receive()).answer.finish_reason is FinishReason.STOP
    assert session.num_unanswered == 0
    await session.send(Append(0, 0, 4, (50, 51), 20))
    await session.receive()
    assert session.committed == [1, 2, 3, 7, 50, 51]
    assert session.finish_reason is FinishReason.NONE


async def test_resume_sends_the_same_steps_again():
    first = Script(opened(), Verdict(1, 0, 1, (), 4), LOST)
    second = Script(opened(step=3, length=5), Verdict(2, 0, 1, (), 5), Verdict(3, 0, 1, (9,), 7))
    session = await session_on(Verifier(first, second))
    for base in (3, 4, 5):
        await session.send(block(base, 7, more=base < 5))
    replies = [await session.receive() for _ in range(3)]
    assert [reply.tokens for reply in replies] == [(7,), (7,), (7, 9)]
    again = second.told[0]
    assert (again.session_id, again.committed_len, again.tokens) == ("s", 4, ())
    assert second.steps() == [("DraftBlock", 2, 0), ("DraftBlock", 3, 0)]
    assert session.traffic.num_reconnects == 1


async def test_steps_that_never_arrived_are_numbered_anew():
    """Blocks 2 and 3 were given up, and neither they nor block 4 reached the verifier."""
    first = Script(opened(), Verdict(1, 1, 0, (9,), 4), LOST)
    second = Script(opened(step=2, epoch=1, length=4), Verdict(2, 1, 1, (6,), 6))
    session = await session_on(Verifier(first, second))
    for base in (3, 4, 5):
        await session.send(block(base, 7, more=True))
    await session.receive()
    await session.send(block(4, 5))
    assert (await session.receive()).tokens == (5, 6)
    assert second.steps() == [("DraftBlock", 2, 1)]


@pytest.mark.parametrize("forgotten", [UNKNOWN, SpecwireError(FaultKind.TIMED_OUT, "Silent for too long.")])
async def test_a_forgotten_session_is_opened_anew_with_all_that_is_committed(forgotten):
    first = Script(opened(), Verdict(1, 1, 0, (9,), 4), LOST)
    second, third = Script(forgotten), Script(opened(length=4), Verdict(1, 0, 1, (6,), 6))
    verifier = Verifier(first, second, third)
    session = await session_on(verifier)
    await session.send(block(3, 7))
    await session.receive()
    await session.send(block(4, 5))
    assert (await session.receive()).tokens == (5, 6)
    fresh = third.told[0]
    assert (fresh.session_id, fresh.tokens, fresh.prompt_len) == ("", (1, 2, 3, 9), 3)
    assert third.steps() == [("DraftBlock", 1, 0)]
    await session.send(block(6, 1))
    assert third.steps()[-1] == ("DraftBlock", 2, 0)


async def test_a_pending_append_becomes_part_of_a_new_session():
    sampling = SamplingParams(temperature=1.0)
    first = Script(opened(), Verdict(1, 0, 1, (), 4, FinishReason.LENGTH), LOST)
    second, third = Script(UNKNOWN), Script(opened(length=6), Verdict(1, 0, 1, (8,), 8))
    session = await session_on(Verifier(first, second, third))
    await session.send(block(3, 7))
    await session.receive()
    await session.send(Append(0, 0, 4, (50, 51), 20, sampling))
    await session.send(block(6, 9))
    assert isinstance((await session.receive()).request, Append)
    assert session.committed == [1, 2, 3, 7, 50, 51]
    assert (await session.receive()).tokens == (9, 8)
    fresh = third.told[0]
    assert (fresh.tokens, fresh.prompt_len) == ((1, 2, 3, 7, 50, 51), 6)
    assert (fresh.max_new_tokens, fresh.sampling) == (20, sampling)


async def test_generate_goes_on_where_it_was_after_a_resume():
    first = Script(opened(), Tokens(1, 0, (7,), 4, last=False), LOST)
    second = Script(opened(length=6, tokens=(8, 9)), Tokens(1, 0, (10,), 7, last=True))
    session = await session_on(Verifier(first, second))
    await session.send(Generate(0, 0, 3, 4))
    replies = [await session.receive() for _ in range(3)]
    assert [reply.tokens for reply in replies] == [(7,), (8, 9), (10,)]
    assert second.told[1] == Generate(1, 0, 6, 1)


async def test_generate_that_was_done_meanwhile_is_not_doubled():
    first = Script(opened(), Tokens(1, 0, (7,), 4, last=False), LOST)
    second = Script(opened(step=2, length=6, tokens=(8, 9)), Tokens(1, 0, (7, 8, 9), 6, FinishReason.STOP))
    session = await session_on(Verifier(first, second))
    await session.send(Generate(0, 0, 3, 9))
    replies = [await session.receive() for _ in range(2)]
    assert [reply.tokens for reply in replies] == [(7,), (8, 9)]
    assert session.finish_reason is FinishReason.STOP


async def test_generate_goes_on_at_another_verifier():
    first = Script(opened(), Tokens(1, 0, (7, 8), 5, last=False), LOST)
    second, third = Script(UNKNOWN), Script(opened(length=5), Tokens(1, 0, (9, 10), 7))
    session = await session_on(Verifier(first, second, third))
    await session.send(Generate(0, 0, 3, 4))
    assert [(await session.receive()).tokens for _ in range(2)] == [(7, 8), (9, 10)]
    assert third.told[1] == Generate(1, 0, 5, 2)


async def test_leaves_a_draining_verifier_between_rounds():
    first = Script(opened(), DRAINING, Verdict(1, 0, 1, (), 4))
    second = Script(opened(length=4), Verdict(1, 0, 1, (), 5), Verdict(2, 0, 1, (6,), 7))
    verifier = Verifier(first, second, addresses=("a:1", "b:2"))
    session = await session_on(verifier)
    await session.send(block(3, 7, more=True))
    receiving = asyncio.create_task(session.receive())
    await asyncio.sleep(0.01)
    assert (await receiving).tokens == (7,)
    await session.send(block(4, 8, more=True))
    await session.send(block(5, 9))
    assert [(await session.receive()).tokens for _ in range(2)] == [(8,), (9, 6)]
    assert first.closed
    assert first.steps() == [("DraftBlock", 1, 0)]
    assert second.told[0].tokens == (1, 2, 3, 7)
    assert second.steps() == [("DraftBlock", 1, 0), ("DraftBlock", 2, 0)]
    assert verifier.visited == ["a:1", "b:2"]
    assert verifier.notices == ["Shutting down."]


async def test_holds_blocks_back_while_a_draining_verifier_finishes_those_in_hand():
    first = Script(opened(), DRAINING)
    second = Script(opened(length=4), Verdict(1, 0, 1, (6,), 6))
    session = await session_on(Verifier(first, second, addresses=("a:1", "b:2")))
    await session.send(block(3, 7, more=True))
    receiving = asyncio.create_task(session.receive())
    await asyncio.sleep(0.01)
    receiving.cancel()
    await session.send(block(4, 8))
    assert first.steps() == [("DraftBlock", 1, 0)]
    first.messages.append(Verdict(1, 0, 1, (), 4))
    assert [(await session.receive()).tokens for _ in range(2)] == [(7,), (8, 6)]
    assert second.steps() == [("DraftBlock", 1, 0)]


async def test_stays_with_a_draining_verifier_while_no_other_takes_the_session():
    first = Script(opened(), DRAINING, Verdict(1, 0, 1, (), 4), Verdict(2, 0, 1, (6,), 6))
    session = await session_on(Verifier(first, LOST, addresses=("a:1", "b:2")))
    await session.send(block(3, 7, more=True))
    await session.receive()
    await session.send(block(4, 8))
    assert (await session.receive()).tokens == (8, 6)
    assert not first.closed


async def test_gives_up_when_patience_ends():
    verifier = Verifier(Script(opened(), LOST), addresses=("a:1", "b:2"), patience=0.5)
    session = await session_on(verifier)
    await session.send(block(3, 7))
    with pytest.raises(DisconnectedError, match="Lost"):
        await session.receive()
    assert {"a:1", "b:2"} == set(verifier.visited)
    assert verifier.notices


async def test_the_first_connection_fails_at_once_when_no_address_answers():
    verifier = Verifier(addresses=("a:1", "b:2"))
    with pytest.raises(DisconnectedError):
        await session_on(verifier)
    assert verifier.visited == ["a:1", "b:2"]


async def test_a_busy_verifier_is_asked_again_when_it_said():
    busy = SpecwireError(FaultKind.OVERLOADED, "Full.", retry_after_ms=30)
    verifier = Verifier(Script(busy), Script(opened(), Verdict(1, 0, 1, (9,), 5)))
    session = await session_on(verifier)
    await session.send(block(3, 7))
    started = asyncio.get_running_loop().time()
    assert (await session.receive()).tokens == (7, 9)
    assert asyncio.get_running_loop().time() - started >= 0.03


async def test_a_busy_verifier_is_left_for_another():
    busy = SpecwireError(FaultKind.OVERLOADED, "Full.", retry_after_ms=60_000)
    verifier = Verifier(Script(busy), Script(opened(), Verdict(1, 0, 1, (9,), 5)), addresses=("a:1", "b:2"))
    session = await session_on(verifier)
    await session.send(block(3, 7))
    assert (await session.receive()).tokens == (7, 9)
    assert verifier.visited == ["a:1", "b:2"]


async def test_silence_is_an_error_only_while_an_answer_is_due():
    session = await session_on(Verifier(Script(opened()), patience=0.05))
    receiving = asyncio.create_task(session.receive())
    await asyncio.sleep(0.1)
    assert not receiving.done()
    await session.send(block(3, 7))
    with pytest.raises(UnansweredError, match="has not answered"):
        await receiving


@pytest.mark.parametrize(
    "answer",
    [
        Verdict(1, 0, 1, (9,), 6),  # another committed length
        Verdict(2, 0, 1, (9,), 5),  # a step that was not asked yet
        Verdict(1, 0, 0, (), 3, stale=True),  # not stale here
    ],
)
async def test_a_mirror_that_differs_is_never_hidden(answer):
    session = await session_on(Verifier(Script(opened(), answer)))
    await session.send(block(3, 7))
    with pytest.raises(SpecwireError, match="disagree") as caught:
        await session.receive()
    assert caught.value.kind is FaultKind.INTERNAL


async def test_other_faults_end_the_session():
    fault: Callable[[], SpecwireError] = lambda: SpecwireError(FaultKind.NOT_FINITE, "NaN.", step=1)  # noqa: E731
    session = await session_on(Verifier(Script(opened(), fault())))
    await session.send(block(3, 7))
    with pytest.raises(SpecwireError, match="NaN"):
        await session.receive()


async def test_a_block_that_is_drafted_while_a_lost_stream_is_mended_follows_those_before_it():
    first = Script(opened(), LOST)
    second = Script(opened(step=1), Verdict(1, 0, 1, (), 4), Verdict(2, 0, 1, (9,), 6), write_s=0.02)
    session = await session_on(Verifier(first, second))
    await session.send(block(3, 7, more=True))
    receiving = asyncio.create_task(session.receive())
    await second.has_steps.wait()
    await session.send(block(4, 8))
    replies = [await receiving, await session.receive()]
    assert [reply.tokens for reply in replies] == [(7,), (8, 9)]
    assert second.steps() == [("DraftBlock", 1, 0), ("DraftBlock", 2, 0)]
