"""A draft that has nothing to do with the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BadDraft:
    """Random logits that follow from the last token alone."""

    max_context = 512

    def __init__(self, vocab_size: int) -> None:
        # [vocab_size, vocab_size], row t after token t
        self._rows = np.random.default_rng(5).normal(0, 2, (vocab_size, vocab_size)).astype(np.float32)
        self.kv_len = 0

    def rollback(self, length: int) -> None:
        self.kv_len = length

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.kv_len += len(tokens)
        return self._rows[tokens[-1]]
