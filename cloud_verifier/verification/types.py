"""What a verification rule is given for one block, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.codecs import Distributions
from shared.faults import SpecwireError
from shared.messages import Logprobs, SamplingParams


@dataclass(frozen=True, slots=True)
class BlockInput:
    """One block to judge.

    Attributes:
        tokens: the K >= 0 drafted tokens; K = 0 is the cloud writing one token alone.
        q: the K distributions they were sampled from; None where the rule needs none or K = 0.
        sampling: what turns the target's logits into p.
        rule: a key of `VERIFICATIONS`.
        base_len: absolute position of tokens[0] in the session; with the seed, the key of every draw.
        more: another block follows, so full acceptance gives no bonus.
        logprobs: 0 none; n: log-probability of each emitted token and of the n - 1 likeliest.
        context: everything committed before tokens[0]; needed only where `sampling` has a logit bias,
            forbidden tokens or penalties (`shared.history.needs_history`).
        prompt_len: how many tokens of `context` are not answer.
        eos_ids: ids that end an answer, for min_tokens.
        siblings: (i, token): other tokens that may stand in the place of tokens[i], whose own rows of logits
            are there too. They must not depend on any draw but those that made `tokens`.
    """

    tokens: tuple[int, ...]
    q: Distributions | None
    sampling: SamplingParams
    rule: str
    base_len: int
    more: bool = False
    logprobs: int = 0
    context: Sequence[int] = ()
    prompt_len: int = 0
    eos_ids: tuple[int, ...] = ()
    siblings: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The verdict on one block.

    Attributes:
        num_accepted: drafted tokens kept.
        tokens: the recovered or bonus token; empty after a fully accepted `more` block. After a sibling, the
            recovered token and the one that follows it.
        fault: set when this block could not be judged; then nothing else counts.
        logprobs: of the accepted tokens and of `tokens`, under the target's own logits at temperature 1.
        sibling: which of the block's siblings the recovered token is; -1: none.
    """

    num_accepted: int
    tokens: tuple[int, ...]
    fault: SpecwireError | None = None
    logprobs: Logprobs | None = None
    sibling: int = -1

    def followed_by(self, extra: BlockOutcome, sibling: int) -> BlockOutcome:
        """This outcome with the token that the target wrote after a sibling."""
        if extra.fault is not None:
            return extra
        logprobs = self.logprobs
        if logprobs is not None and extra.logprobs is not None:
            logprobs = Logprobs(logprobs.ids + extra.logprobs.ids, logprobs.values + extra.logprobs.values)
        return replace(self, tokens=self.tokens + extra.tokens, logprobs=logprobs, sibling=sibling)
