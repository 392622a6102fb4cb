"""One choice of a request: its tokens, text, log-probabilities and cost as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from edge_client.api.backend import Backend
from edge_client.api.pool import Context, Lease, Prompt
from edge_client.api.requests import Wish
from edge_client.results import Counts, Emission, Loss, Origin, Result, Round
from edge_client.session import Traffic
from edge_client.text_stream import TextStream
from shared.messages import FinishReason, SamplingParams

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring seeds of a user never meet


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token that is certainly part of the answer.

    Args:
        text: what became showable with it; texts of all tokens, and of the ending, make the answer.
        logprob: under the target, None where none was asked for.
        top: the likeliest tokens with their log-probabilities.
    """

    token: int
    text: str
    origin: Origin
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and the tokens that are certain by now; `round` is what it took, None for the draft alone."""

    text: str
    tokens: tuple[TokenInfo, ...]
    round: Round | None = None
    losses: frozenset[Loss] = frozenset()


@dataclass(slots=True)
class Cost:
    """What one choice took. Bytes are those of messages with their framing."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    counts: Counts = field(default_factory=Counts)
    up_bytes: int = 0
    down_bytes: int = 0
    wasted_up_bytes: int = 0
    num_reconnects: int = 0
    round_trips_s: float = 0.0
    num_replies: int = 0
    first_token_s: float = 0.0
    waited_s: float = 0.0
    total_s: float = 0.0
    losses: set[Loss] = field(default_factory=set)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    finish_reason: str  # "stop" or "length"
    cost: Cost


async def write(backend: Backend, prompt: Prompt, wish: Wish, index: int) -> AsyncGenerator[Piece | Ending]:
    """Writes choice `index` of `prompt`; the ending comes last.

    Close the generator to stop: the session ends on both sides.

    Raises:
        SpecwireError: what is wrong and what to do.
    """
    asked = time.perf_counter()
    sampling = replace(wish.sampling, seed=(wish.sampling.seed + index * _SEED_STEP) % (1 << 64))
    asked_logprobs = 0 if wish.logprobs is None else wish.logprobs + 1
    pool = await backend.pool()
    async with pool.lease(prompt, asked_logprobs) as lease:
        backend.introduce(lease.context.conversation)
        writer = _Writer(backend, lease, prompt, wish, sampling)
        writer.cost.waited_s = time.perf_counter() - asked
        async with aclosing(writer.run()) as pieces:
            async for piece in pieces:
                yield piece


class _Writer:
    def __init__(
        self, backend: Backend, lease: Lease, prompt: Prompt, wish: Wish, sampling: SamplingParams
    ) -> None:
        self._backend = backend
        self._lease = lease
        self._prompt = prompt
        self._wish = wish
        self._sampling = sampling
        self._text = _Trimmer(backend.tokenizer, wish.stop)
        self._answer: list[int] = []
        self.cost = Cost(prompt_tokens=len(lease.tokens), reused_tokens=lease.num_reused, seed=sampling.seed)

    async def run(self) -> AsyncGenerator[Piece | Ending]:
        context, cost = self._lease.context, self.cost
        conversation = context.conversation
        traffic = _TrafficMeter(context)
        started = time.perf_counter()
        finish = "stop"
        room = max(self._backend.max_context - len(self._lease.tokens), 1)
        answer = conversation.answer(
            self._lease.tokens,
            sampling=self._sampling,
            max_new_tokens=min(self._wish.max_new_tokens or room, room),
            controller=self._backend.controller(),
        )
        context.text = None
        async with aclosing(answer):
            async for event in answer:
                if isinstance(event, Result):
                    finish = "length" if event.finish_reason is FinishReason.LENGTH else "stop"
                    break
                cost.first_token_s = cost.first_token_s or time.perf_counter() - started
                piece = self._take(event)
                traffic.read(cost)
                yield piece
                if self._text.stopped:
                    finish = "stop"
                    break
        if conversation.history and self._prompt.text is not None:
            context.text = self._prompt.text + self._decode(self._answer)
        yield replace(self._text.flush(), losses=frozenset(cost.losses))
        traffic.read(cost)
        cost.total_s = time.perf_counter() - started
        cost.completion_tokens = self._text.num_tokens
        yield Ending(finish, cost)

    def _take(self, emission: Emission) -> Piece:
        cost = self.cost
        cost.counts.add(emission)
        cost.losses |= emission.losses
        if not emission.is_edge_only:
            cost.round_trips_s += emission.round.round_trip_s
            cost.num_replies += 1
        self._answer += emission.tokens
        piece = self._text.push(self._infos(emission))
        done = None if emission.is_edge_only else emission.round
        return replace(piece, round=done, losses=emission.losses)

    def _infos(self, emission: Emission) -> list[TokenInfo]:
        """The emission's tokens less the one that ends the answer, which is no part of it."""
        logprobs = emission.logprobs
        infos: list[TokenInfo] = []
        # A reply that was partly known already names more tokens than are new.
        skipped = len(logprobs.ids) - len(emission.tokens) if logprobs is not None else 0
        for index, (token, origin) in enumerate(zip(emission.tokens, emission.origins, strict=True)):
            if token in self._backend.manifest.eos_ids:
                break
            if logprobs is None or not self._wish_logprobs or skipped < 0:
                infos.append(TokenInfo(token, "", origin))
                continue
            ids, values = logprobs.ids[index + skipped], logprobs.values[index + skipped]
            top = tuple(zip(ids[1:], values[1:], strict=True))
            infos.append(TokenInfo(token, "", origin, values[0], top))
        return infos

    @property
    def _wish_logprobs(self) -> bool:
        return self._wish.logprobs is not None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.tokenizer.decode(list(tokens), skip_special_tokens=False))


class _TrafficMeter:
    """Bytes of one answer: its session may have begun before it, or begin with it."""

    def __init__(self, context: Context) -> None:
        self._conversation = context.conversation
        self._session = self._conversation.traffic
        self._before = replace(self._session) if self._session is not None else Traffic()
        self._latest: Traffic | None = None

    def read(self, cost: Cost) -> None:
        # A session that has ended still says what it took, down to what was in flight when it was stopped.
        now = self._latest = self._conversation.traffic or self._latest
        if now is None:
            return
        before = self._before if now is self._session else Traffic()
        cost.up_bytes = now.up_bytes - before.up_bytes
        cost.down_bytes = now.down_bytes - before.down_bytes
        cost.wasted_up_bytes = now.wasted_up_bytes - before.wasted_up_bytes
        cost.num_reconnects = now.num_reconnects - before.num_reconnects


class _Trimmer:
    """Text and tokens that end at the same place.

    A token is given out when all text up to its end is, so that a stop string found later never takes
    back a token.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, stop)
        self._waiting: list[TokenInfo] = []
        self.num_tokens = 0  # given out

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    def push(self, infos: Sequence[TokenInfo]) -> Piece:
        text, ready = "", list[TokenInfo]()
        for info in infos:
            new = self._stream.push([info.token])
            text += new
            self._waiting.append(replace(info, text=new))
            if self._stream.stopped:
                self._drop_tail()
            if self._stream.settled or self._stream.stopped:
                ready += self._give_out()
            if self._stream.stopped:
                break
        return Piece(text, tuple(ready))

    def flush(self) -> Piece:
        text = self._stream.flush()
        if self._stream.stopped:
            self._drop_tail()
        ready = self._give_out()
        if ready and text:
            ready[-1] = replace(ready[-1], text=ready[-1].text + text)
        return Piece(text, tuple(ready))

    def _give_out(self) -> list[TokenInfo]:
        ready, self._waiting = self._waiting, []
        self.num_tokens += len(ready)
        return ready

    def _drop_tail(self) -> None:
        """Forgets tokens that only the stop string needed; their text goes to the last one that stays."""
        kept = max(self._stream.num_kept - self.num_tokens, 0)
        lost = "".join(info.text for info in self._waiting[kept:])
        self._waiting = self._waiting[:kept]
        if lost and self._waiting:
            self._waiting[-1] = replace(self._waiting[-1], text=self._waiting[-1].text + lost)
