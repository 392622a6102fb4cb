"""One draft model for many answers: each has a context of its own and takes turns at the processor.

A turn is one `feed`: one drafted token, or one piece of a prompt. Turns are given in the order in
which they are asked for, so a long prompt delays nobody by more than a piece of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edge_client.drafting import Model


class Turnstile:
    """A lock that is first come, first served."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._guard:
            mine = threading.Event() if self._taken else None
            if mine is not None:
                self._waiting.append(mine)
            self._taken = True
        if mine is not None:
            mine.wait()
        try:
            yield
        finally:
            with self._guard:
                if self._waiting:
                    self._waiting.popleft().set()  # handed over: nobody can step in between
                else:
                    self._taken = False


class SharedModel:
    """A draft context that waits for its turn."""

    def __init__(self, model: Model, turnstile: Turnstile) -> None:
        self._model = model
        self._turnstile = turnstile
        self.max_context = model.max_context
        self.kv_len = model.kv_len

    def rollback(self, length: int) -> None:
        self._model.rollback(length)
        self.kv_len = self._model.kv_len

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with self._turnstile.turn():
            logits = self._model.feed(tokens)
        self.kv_len = self._model.kv_len
        return logits
