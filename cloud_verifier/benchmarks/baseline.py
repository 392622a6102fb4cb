"""The honest baseline: `transformers` generating alone, with the same weights and dtype."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.quiet import quiet_transformers


@dataclass(frozen=True, slots=True)
class Timed:
    """An answer and when its tokens came, in seconds after the request.

    `num_first` tokens came together at `first_token_s`.
    """

    tokens: tuple[int, ...]
    first_token_s: float
    last_token_s: float
    num_first: int = 1

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first arrival over the time after it: the prompt's cost is not in it."""
        return (len(self.tokens) - self.num_first) / (self.last_token_s - self.first_token_s)

    @property
    def answer_tokens_per_s(self) -> float:
        return len(self.tokens) / self.last_token_s


@dataclass(frozen=True, slots=True)
class Scored:
    """Of the tokens of an answer, by the target's distribution at each place, [n] each.

    Attributes:
        logprobs: of the token.
        entropies: of the distribution, in nats: what -logprobs are on average.
        uniforms: the mass of the likelier tokens and a random part of the token's own: uniform on [0, 1],
            independently, if and only if each token was drawn from its distribution.
    """

    logprobs: NDArray[np.float64]
    entropies: NDArray[np.float64]
    uniforms: NDArray[np.float64]


class _FirstTokenClock:
    """A transformers streamer that only looks at the clock: it gets the prompt, then every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class HfGenerate:
    """Stock `generate` of a stock model."""

    def __init__(self, name_or_path: str, *, device: str = "cpu", dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            self._model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=getattr(torch, dtype))
        self._model.eval().to(device)
        self._device = device

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        eos_ids: Sequence[int] = (),
    ) -> Timed:
        """Greedy at temperature 0, else plain sampling. `eos_ids` empty goes on to `max_new_tokens`."""
        torch.manual_seed(seed)
        clock = _FirstTokenClock()
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature > 0
            else {"do_sample": False}
        )
        ids = torch.tensor([list(prompt)], device=self._device)
        started = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
            streamer=clock,
            **sampling,
        )
        tokens = tuple(int(token) for token in out[0, len(prompt) :])
        return Timed(tokens, clock.times[1] - started, clock.times[-1] - started)

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], tokens: Sequence[int], *, temperature: float, seed: int) -> Scored:
        """What the model says of each of `tokens` in its place; `seed` is for the random part of it."""
        ids = torch.tensor([[*prompt, *tokens]], device=self._device)
        rows = self._model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1].double() / temperature
        logprobs = torch.log_softmax(rows, dim=-1)
        probs = logprobs.exp()
        picked = logprobs.gather(1, ids[0, len(prompt) :, None])
        likelier = (probs * (logprobs > picked)).sum(dim=1).cpu().numpy()
        own = picked[:, 0].exp().cpu().numpy()
        return Scored(
            picked[:, 0].cpu().numpy(),
            -(probs * logprobs).sum(dim=1).cpu().numpy(),
            likelier + np.random.default_rng(seed).random(len(own)) * own,
        )
