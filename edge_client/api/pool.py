"""Draft contexts and sessions, kept after an answer so that the next turn of a chat goes on from there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from edge_client.generate import Conversation
from shared.faults import FaultKind, SpecwireError

_RETRY_AFTER_MS = 2_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue. `text` is None where only ids were given."""

    tokens: tuple[int, ...]
    text: str | None = None


@dataclass(slots=True)
class Context:
    """A conversation on a draft context of its own, and the text that both sides know of it.

    Args:
        logprobs: what its session was opened with; a session cannot change it.
        tokens: what the draft context has read of, the last prompt and its answer.
        prompt_len: how many of them were the prompt.
        text: of the whole session, None when it is not known or there is no session.
    """

    conversation: Conversation
    logprobs: int
    tokens: tuple[int, ...] = ()
    prompt_len: int = 0
    text: str | None = None
    busy: bool = False
    last_used: int = 0

    def common(self, prompt: Prompt) -> int:
        """Tokens that need not be read again; 0 where another conversation would lose more by it."""
        common = _common(self.tokens, prompt.tokens)
        if self.conversation.history:
            # It waits for its next turn, unless this is its last prompt once more.
            return common if common >= self.prompt_len else 0
        return common if 2 * common > len(self.tokens) else 0

    def continued(self, prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...] | None:
        """The prompt's tokens if it only adds to this session, else None.

        Texts are compared, because an answer's tokens need not be those that its text encodes to.
        """
        held = self.conversation.history
        if not held:
            return None
        if len(held) < len(prompt.tokens) and prompt.tokens[: len(held)] == held:
            return prompt.tokens
        if self.text is None or prompt.text is None or len(self.text) >= len(prompt.text):
            return None
        if not prompt.text.startswith(self.text):
            return None
        rest = tokenizer.encode(prompt.text[len(self.text) :], add_special_tokens=False).ids
        return (*held, *rest) if rest else None


@dataclass(frozen=True, slots=True)
class Lease:
    """A context for one answer, whose draft has read `num_reused` tokens of the prompt already."""

    context: Context
    tokens: tuple[int, ...]
    num_reused: int


class Pool:
    """At most `size` answers at once; the others wait in the order in which they came.

    Args:
        make: a conversation on a new draft context; its argument is what its sessions ask of logprobs.
        size: contexts at most. Each holds the draft's keys and values of one conversation.
        max_waiting: answers that may wait; more are refused.
    """

    def __init__(
        self, make: Callable[[int], Conversation], tokenizer: Tokenizer, size: int, max_waiting: int = 256
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._size = size
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._free = asyncio.Semaphore(size)  # asyncio's wakes waiters in order
        self._contexts: list[Context] = []
        self._clock = itertools.count(1)

    @property
    def num_busy(self) -> int:
        return sum(context.busy for context in self._contexts)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @asynccontextmanager
    async def lease(self, prompt: Prompt, logprobs: int) -> AsyncIterator[Lease]:
        """The best context for this prompt, once one is free.

        Raises:
            SpecwireError: OVERLOADED when too many wait already.
        """
        await self._wait()
        try:
            context, tokens, num_reused = self._choose(prompt, logprobs)
            context.busy, context.last_used = True, next(self._clock)
            try:
                yield Lease(context, tokens, num_reused)
            finally:
                context.busy = False
                context.tokens = context.conversation.history or tokens
                context.prompt_len = len(tokens)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Ends every session."""
        contexts, self._contexts = self._contexts, []
        for context in contexts:
            await context.conversation.__aexit__(None, None, None)

    async def _wait(self) -> None:
        if self._num_waiting >= self._max_waiting:
            raise SpecwireError(
                FaultKind.OVERLOADED,
                f"{self._num_waiting} answers wait for this device already.",
                "Try again later.",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    def _choose(self, prompt: Prompt, logprobs: int) -> tuple[Context, tuple[int, ...], int]:
        """A session to continue, else much of the same text, else an unused context, else the oldest."""
        idle = [context for context in self._contexts if not context.busy]
        fitting = [context for context in idle if context.logprobs == logprobs]
        best: tuple[Context, tuple[int, ...], int] | None = None
        for context in fitting:
            tokens = context.continued(prompt, self._tokenizer)
            held = len(context.conversation.history)
            if tokens is not None and (best is None or held > best[2]):
                best = (context, tokens, held)
        if best is not None:
            return best
        near = max(fitting, key=lambda context: context.common(prompt), default=None)
        if near is not None and (common := near.common(prompt)):
            return near, prompt.tokens, min(common, len(prompt.tokens) - 1)
        if len(self._contexts) >= self._size:
            self._replace(min(idle, key=lambda context: context.last_used))
        context = Context(self._make(logprobs), logprobs)
        self._contexts.append(context)
        return context, prompt.tokens, 0

    def _replace(self, context: Context) -> None:
        """Drops a context; a new one starts with a small buffer, whatever this one had grown to."""
        self._contexts.remove(context)
        self._closing = asyncio.ensure_future(context.conversation.__aexit__(None, None, None))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
