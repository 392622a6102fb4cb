"""A client of the engine without a network, and what the target alone would have written."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from cloud_verifier.auth import Identity
from cloud_verifier.engine import Engine
from cloud_verifier.target_model import Segment, TargetModel
from shared.codecs import Distributions
from shared.faults import SpecwireError
from shared.messages import (
    Append,
    DraftBlock,
    FinishReason,
    Generate,
    Open,
    Opened,
    SamplingParams,
    TokenizerIdentity,
    Tokens,
    Verdict,
)
from shared.wire import ServerMessage

NO_TOKENIZER = TokenizerIdentity("", 259)
PATIENCE_S = 20.0


def request(prompt: Sequence[int], max_new_tokens: int = 32, **changes: object) -> Open:
    base = Open(
        tokenizer=NO_TOKENIZER,
        tokens=tuple(prompt),
        sampling=SamplingParams(),
        codec="lattice",
        verification="token",
        max_block=16,
        max_new_tokens=max_new_tokens,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def one_hot(tokens: Sequence[int]) -> Distributions:
    return Distributions(
        np.arange(len(tokens) + 1, dtype=np.int64), np.array(tokens, np.int32), np.ones(len(tokens))
    )


@contextmanager
def running(model: TargetModel, **options: object) -> Iterator[Engine]:
    """An engine over `model`; on leaving, every slot must have come back."""
    engine = Engine(model, **options)  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        assert not engine.is_alive
        assert model.pool.num_free == model.pool.num_slots


class Client:
    """One session on an engine, mirrored as an edge mirrors it."""

    def __init__(self, engine: Engine, identity: Identity | None = None) -> None:
        self.inbox: queue.Queue[ServerMessage] = queue.Queue()
        self.engine = engine
        self.ticket = engine.ticket(identity or Identity(), self.inbox.put)
        self.committed: list[int] = []
        self.epoch = 0
        self.step = 1
        self.opened: Opened | None = None
        self.finish = FinishReason.NONE

    def get(self) -> ServerMessage:
        message = self.inbox.get(timeout=PATIENCE_S)
        if isinstance(message, SpecwireError):
            raise message
        return message

    def fault(self) -> SpecwireError:
        """Waits for the fault that ends this session."""
        while not isinstance(message := self.inbox.get(timeout=PATIENCE_S), SpecwireError):
            pass
        return message

    def open(self, message: Open) -> Opened:
        self.ticket.open(message)
        opened = self.get()
        assert isinstance(opened, Opened)
        if message.session_id:
            self.committed = self.committed[: message.committed_len] + list(opened.tokens)
        else:
            self.committed = list(message.tokens)
        assert opened.committed_len == len(self.committed)
        self.epoch, self.step, self.finish = opened.epoch, opened.next_step, opened.finish_reason
        self.opened = opened
        return opened

    def send_block(
        self, tokens: Sequence[int], q: Distributions | None = None, **changes: object
    ) -> DraftBlock:
        block = DraftBlock(self.step, self.epoch, len(self.committed), tuple(tokens), b"")
        block = replace(block, **changes)  # type: ignore[arg-type]
        self.step = block.step + 1
        self.ticket.submit(block, one_hot(block.tokens) if q is None else q)
        return block

    def verdict(self, block: DraftBlock) -> Verdict:
        """The next message, which must be the verdict on `block`; applied to the mirror."""
        verdict = self.get()
        assert isinstance(verdict, Verdict)
        assert verdict.step == block.step
        if not verdict.stale:
            self.committed += (*block.tokens[: verdict.num_accepted], *verdict.tokens)
        assert verdict.committed_len == len(self.committed)
        assert verdict.epoch >= self.epoch
        self.epoch, self.finish = verdict.epoch, verdict.finish_reason
        return verdict

    def generate(self, num_tokens: int) -> list[int]:
        self.ticket.submit(Generate(self.step, self.epoch, len(self.committed), num_tokens))
        return self.generated()

    def generated(self) -> list[int]:
        """All that the Generate under way writes."""
        written: list[int] = []
        while True:
            message = self.get()
            assert isinstance(message, Tokens)
            written += message.tokens
            self.committed += message.tokens
            assert message.committed_len == len(self.committed)
            self.epoch, self.finish = message.epoch, message.finish_reason
            if message.last:
                self.step = message.step + 1
                return written

    def append(self, tokens: Sequence[int], max_new_tokens: int = 32) -> None:
        self.ticket.submit(Append(self.step, self.epoch, len(self.committed), tuple(tokens), max_new_tokens))
        message = self.get()
        assert isinstance(message, Tokens)
        assert not message.tokens
        self.committed += tokens
        assert message.committed_len == len(self.committed)
        self.step, self.finish = self.step + 1, message.finish_reason

    def answer(self, prompt: Sequence[int], num_tokens: int, **changes: object) -> list[int]:
        """Opens, lets the target write, and closes."""
        self.open(request(prompt, num_tokens, **changes))
        written = self.generate(num_tokens)
        self.ticket.close()
        return written


class Alone:
    """The target's own greedy text, one sequence at a time and with nothing of the engine."""

    def __init__(self, model: TargetModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        text = self._known.setdefault(tuple(prompt), [])
        if len(text) < num_tokens:
            text += self._write([*prompt, *text], num_tokens - len(text))
        return text[:num_tokens]

    @torch.inference_mode()
    def _write(self, tokens: list[int], num_tokens: int) -> list[int]:
        pool = self._model.pool
        slots = pool.allocate(len(tokens) + num_tokens)
        start = len(tokens)
        new = tokens
        for length in range(start, start + num_tokens):
            logits = self._model.forward([Segment(np.array(new), slots[:length], 1)])
            new = [int(logits[0].argmax())]
            tokens = tokens + new
        pool.release(slots)
        return tokens[start:]


def prompts(num: int, length: int, seed: int = 0, vocab_size: int = 256) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(num)]


def sync(engine: Engine) -> None:
    """Waits until the engine has done all that was asked of it before, the work in hand excepted."""
    done = threading.Event()
    engine.post(done.set)
    assert done.wait(PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    """Waits for the engine's thread to get there."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
