"""What a verification rule is given for one block, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The verdict on one block.

    Attributes:
        num_accepted: drafted tokens kept.
        tokens: the recovered or bonus token; empty after a fully accepted `more` block.
        fault: set when this block could not be judged; then nothing else counts.
        logprobs: of the accepted tokens and of `tokens`, under the target's own logits at temperature 1.
    """

    num_accepted: int
    tokens: tuple[int, ...]
    fault: SpecwireError | None = None
    logprobs: Logprobs | None = None
