"""The `specwire` object of a reply: what speculation did, under the one name that OpenAI lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge_client.api.backend import Choices
from edge_client.api.writer import Cost, TokenInfo
from edge_client.results import Loss, Origin


def specwire_report(costs: Sequence[Cost], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Sums over the choices of a request.

    Keys:
        verification, codec: the rule that judged, and how distributions travelled.
        emulation: where the verifier waits as a bigger model would, the model whose times these are.
        lossy, lossy_because: whether anything was not exact, and why: "verification" when the rule does
            not keep the target's distribution, "edge_only" when the draft wrote some of it alone, "prompt"
            when so it did with what this answer follows. False means that the text is distributed as the
            target's own. Chunks of a stream say it too, as far as it is true of them.
        rounds, drafted, accepted, acceptance: blocks judged, tokens drafted and kept, their ratio.
        tokens_per_round: answer tokens that one block gave on average.
        origins: tokens by where they came from; the one that ends an answer is counted here.
        up_bytes, down_bytes, wasted_up_bytes, bytes_per_token: of messages with their framing.
        round_trip_ms: mean over the blocks.
        first_token_ms, waited_ms: of the slowest choice, from when a context was free; waiting for it.
        tokens_per_s: over all choices, by the slowest one's time.
        reconnects: streams that were lost and replaced.
        seeds: of the choices, in order; each alone gives its text again where `--k` is fixed. With `--k auto`
            that holds at temperature 0 and with coupled verification only.
    """
    drafted = sum(cost.counts.num_drafted for cost in costs)
    accepted = sum(cost.counts.num_accepted for cost in costs)
    rounds = sum(cost.counts.num_rounds for cost in costs)
    origins = {origin.value: sum(cost.counts.by_origin[origin] for cost in costs) for origin in Origin}
    speculated = sum(cost.counts.num_speculated for cost in costs)
    tokens = sum(cost.completion_tokens for cost in costs)
    up_bytes = sum(cost.up_bytes for cost in costs)
    down_bytes = sum(cost.down_bytes for cost in costs)
    replies = sum(cost.num_replies for cost in costs)
    total_s = max((cost.total_s for cost in costs), default=0.0)
    return {
        **facts,
        **lossy_report(frozenset[Loss]().union(*(cost.losses for cost in costs))),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / max(drafted, 1), 4),
        "tokens_per_round": round(speculated / max(rounds, 1), 3),
        "origins": {name: count for name, count in origins.items() if count},
        "up_bytes": up_bytes,
        "down_bytes": down_bytes,
        "wasted_up_bytes": sum(cost.wasted_up_bytes for cost in costs),
        "bytes_per_token": round((up_bytes + down_bytes) / max(tokens, 1), 1),
        "round_trip_ms": round(1e3 * sum(cost.round_trips_s for cost in costs) / max(replies, 1), 2),
        "first_token_ms": round(1e3 * max((cost.first_token_s for cost in costs), default=0.0), 1),
        "waited_ms": round(1e3 * max((cost.waited_s for cost in costs), default=0.0), 1),
        "tokens_per_s": round(tokens / total_s, 2) if total_s else 0.0,
        "reconnects": sum(cost.num_reconnects for cost in costs),
        "seeds": [cost.seed for cost in costs],
    }


def verifier_facts(choices: Choices | None) -> dict[str, Any]:
    """What `specwire` says of the verifier; nothing where none was reached."""
    if choices is None:
        return {}
    facts = {"verification": choices.settings.verification, "codec": choices.settings.codec}
    emulation = choices.description.emulation
    return facts | ({"emulation": emulation} if emulation else {})


def lossy_report(losses: Collection[Loss]) -> dict[str, Any]:
    return {"lossy": bool(losses), "lossy_because": sorted(losses)}


def trace_entry(info: TokenInfo) -> dict[str, Any]:
    return {"id": info.token, "text": info.text, "origin": info.origin.value}
