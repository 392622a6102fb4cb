"""The rules that turn (block, p, q) into a verdict, over the ragged batch of one forward pass.

Each rule faces its oracle in `shared.reference`. Arithmetic is float32 or wider whatever type the
target runs in, and nothing loops over sessions except the packing of their metadata.

What a client can force. Rules that need q trust the client about it: whoever understates q(x), or
draws from something else than the q it sends, gets any x with p(x) > 0 accepted, and so steers the
text as far as the target's support goes (never beyond it: p(x) = 0 is never accepted). That hurts
nobody but the client's own answer, unless somebody else relies on the text being the target's. An
operator for whom that matters allows only `coupled` and `greedy`, which never look at q: their output
is a function of prompt, seed and target alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from cloud_verifier.verification.batch import Batch, pack, params_of
from cloud_verifier.verification.block import judge_block
from cloud_verifier.verification.coupled import judge_coupled
from cloud_verifier.verification.greedy import judge_greedy
from cloud_verifier.verification.logprobs import emitted_logprobs
from cloud_verifier.verification.penalties import adjust_logits
from cloud_verifier.verification.rejection import judge_fused, judge_token
from cloud_verifier.verification.rows import Rows
from cloud_verifier.verification.types import BlockInput, BlockOutcome
from shared.faults import FaultKind, SpecwireError
from shared.history import needs_history
from shared.messages import SamplingParams
from shared.sampling import is_greedy

__all__ = [
    "VERIFICATIONS",
    "BlockInput",
    "BlockOutcome",
    "Verification",
    "get_verification",
    "is_lossy",
    "judge",
]


class Rule(Protocol):
    def __call__(self, rows: Rows, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Judges all blocks of a batch at once.

        Args:
            rows: the R rows of these blocks. top-k, top-p, min-p or greedy sampling take tokens from all of
                them, or from none.
            batch: the blocks as arrays.

        Returns:
            num_accepted [B], and the recovered or bonus token [B] (ignored after a full `more` block).
        """
        ...


@dataclass(frozen=True, slots=True)
class Verification:
    """One entry of the table.

    Attributes:
        judge: the rule.
        needs_q: whether blocks must carry the distributions that they were drawn from.
        weighs: whether the rule needs the normaliser of every row that nothing truncates.
        sequential: whether a rejected token ends the rule's work, so that no later row decides anything.
        lossy: whether a `fused_weight` above 0 lets the output differ from the target's distribution.
    """

    judge: Rule
    needs_q: bool = True
    weighs: bool = True
    sequential: bool = True
    lossy: bool = False


# In order of preference.
VERIFICATIONS: Mapping[str, Verification] = MappingProxyType(
    {
        "block": Verification(judge_block, sequential=False),
        "token": Verification(judge_token),
        "coupled": Verification(judge_coupled, needs_q=False, weighs=False),
        "greedy": Verification(judge_greedy, needs_q=False, weighs=False),
        "fused": Verification(judge_fused, lossy=True),
    }
)


def get_verification(name: str) -> Verification:
    """The rule of that name, or SpecwireError(UNKNOWN_VERIFICATION) that names the known ones."""
    verification = VERIFICATIONS.get(name)
    if verification is None:
        raise SpecwireError(
            FaultKind.UNKNOWN_VERIFICATION,
            f"There is no verification {name!r}.",
            f"Choose one of: {', '.join(VERIFICATIONS)}.",
        )
    return verification


def is_lossy(rule: str, params: SamplingParams) -> bool:
    """Whether the rule, with these parameters, does not keep the target's distribution."""
    return VERIFICATIONS[rule].lossy and params.fused_weight > 0


def judge(logits: torch.Tensor, blocks: Sequence[BlockInput]) -> list[BlockOutcome]:
    """Verdicts of the blocks of one pass, in their order; a fault ends up in its own block's outcome.

    Args:
        logits: [sum (K_b + 1 + S_b), V] in any float type; row i of a block judges its token i, the next is
            the bonus row, and the last S_b are those after its siblings.
        blocks: the blocks, in the order of their rows.
    """
    row_starts = np.cumsum([0, *(len(block.tokens) + 1 + len(block.siblings) for block in blocks)])
    if logits.ndim != 2 or len(logits) != row_starts[-1]:
        raise ValueError(f"{row_starts[-1]} rows of logits are needed, got shape {tuple(logits.shape)}")
    starts = row_starts[:-1].tolist()
    outcomes = _judge_all(logits, blocks, starts)
    # What follows a recovered token was computed with the rest if somebody thought of that token before. The
    # target then writes the next token alone: a block without drafted tokens, of which the draws know nothing
    # of why it is judged now.
    taken = {i: place for i, block in enumerate(blocks) if (place := _sibling_taken(block, outcomes[i])) >= 0}
    if taken:
        after = [_after_sibling(blocks[i], outcomes[i]) for i in taken]
        rows = [starts[i] + len(blocks[i].tokens) + 1 + place for i, place in taken.items()]
        for (i, place), extra in zip(taken.items(), _judge_all(logits, after, rows), strict=True):
            outcomes[i] = outcomes[i].followed_by(extra, place)
    return outcomes


def _sibling_taken(block: BlockInput, outcome: BlockOutcome) -> int:
    """Which of the siblings the recovered token is; -1: none."""
    if not block.siblings or outcome.fault is not None or outcome.num_accepted == len(block.tokens):
        return -1
    recovered = (outcome.num_accepted, outcome.tokens[0])
    return block.siblings.index(recovered) if recovered in block.siblings else -1


def _after_sibling(block: BlockInput, outcome: BlockOutcome) -> BlockInput:
    """The target writing alone after what `outcome` committed."""
    emitted = block.tokens[: outcome.num_accepted] + outcome.tokens
    return replace(
        block,
        tokens=(),
        q=None,
        siblings=(),
        more=False,
        base_len=block.base_len + len(emitted),
        context=(*block.context, *emitted) if needs_history(block.sampling) else (),
    )


def _judge_all(
    logits: torch.Tensor, blocks: Sequence[BlockInput], row_starts: Sequence[int]
) -> list[BlockOutcome]:
    """Verdicts of blocks whose rows begin at `row_starts`.

    Blocks that are computed alike are judged together, so that none is computed differently in other company.
    """
    outcomes: list[BlockOutcome | None] = [None] * len(blocks)
    groups: dict[tuple[str, bool, bool], list[int]] = {}
    params = params_of([block.sampling for block in blocks])
    truncates = params.truncates(logits.shape[1]).tolist()
    for i, block in enumerate(blocks):
        try:
            rule = _effective_rule(block, logits.shape[1])
        except SpecwireError as fault:
            outcomes[i] = BlockOutcome(0, (), fault=fault)
            continue
        alike = (rule, needs_history(block.sampling), rule != "greedy" and truncates[i])
        groups.setdefault(alike, []).append(i)
    for (rule, adjusts, _), members in groups.items():
        chosen, starts = [blocks[i] for i in members], [row_starts[i] for i in members]
        batch = pack(
            chosen, starts, params.of_rows(np.array(members)), with_draft=VERIFICATIONS[rule].needs_q
        )
        for i, outcome in zip(members, _judge_group(rule, adjusts, logits, chosen, batch), strict=True):
            outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _judge_group(
    rule: str, adjusts: bool, logits: torch.Tensor, blocks: Sequence[BlockInput], batch: Batch
) -> list[BlockOutcome]:
    verification = VERIFICATIONS[rule]
    adjusted = adjust_logits(logits, batch, blocks) if adjusts else logits
    index = np.arange(len(batch.rows)) if adjusts else batch.rows
    greedy = rule == "greedy"
    rows = Rows.read(
        adjusted, index, batch.params, weigh=verification.weighs, choose=greedy, lazily=not greedy
    )
    num_accepted, tokens = verification.judge(rows, batch)
    # The one copy from the device.
    host = torch.cat([num_accepted, tokens, torch.isfinite(rows.top)]).cpu().numpy()
    verdicts, finite = host[: 2 * len(blocks)].reshape(2, -1), host[2 * len(blocks) :]
    # A NaN or +inf anywhere in a row shows in its maximum; -inf only forbids a token.
    faulty = finite == 0
    if verification.sequential:
        faulty &= batch.within <= verdicts[0][batch.block_of_row]
    at_fault = set(batch.block_of_row[faulty].tolist())
    logprobs = emitted_logprobs(logits, batch, blocks, verdicts[0], verdicts[1])
    outcomes = []
    impossible = _impossible_tokens(batch)
    for i, (block, kept, token) in enumerate(zip(blocks, *verdicts.tolist(), strict=True)):
        if i in at_fault:
            outcomes.append(BlockOutcome(0, (), fault=_not_finite()))
            continue
        if i in impossible:
            outcomes.append(BlockOutcome(0, (), fault=_impossible(block, impossible[i])))
            continue
        beyond = () if block.more and kept == len(block.tokens) and block.tokens else (token,)
        outcomes.append(BlockOutcome(kept, beyond, logprobs=logprobs[i]))
    return outcomes


def _effective_rule(block: BlockInput, vocab_size: int) -> str:
    """The rule's name, "greedy" where every exact rule is the same; SpecwireError if it cannot be judged."""
    verification = get_verification(block.rule)
    num_drafted = len(block.tokens)
    if num_drafted and not 0 <= min(block.tokens) <= max(block.tokens) < vocab_size:
        raise SpecwireError(
            FaultKind.BAD_TOKENS,
            f"A drafted token is outside the vocabulary of {vocab_size}.",
            "Use a draft model with the verifier's tokenizer.",
        )
    if is_greedy(block.sampling) and not is_lossy(block.rule, block.sampling):
        return "greedy"
    num_rows = block.q.num_rows if block.q is not None else 0
    if num_drafted and verification.needs_q and num_rows != num_drafted:
        raise _too_few_distributions(block)
    return block.rule


def _impossible_tokens(batch: Batch) -> dict[int, int]:
    """Block -> a token of it that cannot have been drawn from the q sent with it, if any was."""
    if batch.draft is None:
        return {}
    at_fault = np.flatnonzero(batch.draft.drawn <= 0)
    return dict(zip(batch.block_of_token[at_fault].tolist(), batch.tokens[at_fault].tolist(), strict=True))


def _impossible(block: BlockInput, token: int) -> SpecwireError:
    if block.q is None or not np.diff(block.q.offsets).all():
        return _too_few_distributions(block)
    return SpecwireError(
        FaultKind.BAD_TOKENS,
        f"Drafted token {token} has probability 0 in the distribution that was sent with it.",
        "Sample the draft from what the codec's bytes decode to.",
    )


def _too_few_distributions(block: BlockInput) -> SpecwireError:
    num_carried = np.count_nonzero(np.diff(block.q.offsets)) if block.q is not None else 0
    return SpecwireError(
        FaultKind.BAD_PAYLOAD,
        f"{block.rule} verification of {len(block.tokens)} tokens needs as many distributions, "
        f"got {num_carried}.",
        "Choose a codec that carries distributions, or greedy verification.",
    )


def _not_finite() -> SpecwireError:
    return SpecwireError(
        FaultKind.NOT_FINITE,
        "The target model gave logits that are not finite for this session.",
        "Serve the model in a wider number format (--dtype float32 or bfloat16), or shorten the prompt.",
    )
