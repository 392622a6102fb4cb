"""From the samples of `network` to its report: medians with their spread, ratios, and what pays where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloud_verifier.benchmarks.network_edge import AUTO, Sample
from cloud_verifier.benchmarks.report import Spread
from cloud_verifier.emulation import parse_emulation

if TYPE_CHECKING:
    from rich.table import Table

    from cloud_verifier.passes import StepEmulation

REAL = "real"
CLOUD_ONLY = "cloud_only"


def report(options: Mapping[str, Any], links: Mapping[str, Mapping[str, Any]], draft: str) -> dict[str, Any]:
    """All that is known so far; `links` as `network.run` fills it."""
    return {
        "settings": {
            "tokens": options["tokens"],
            "seeds": options["seeds"],
            "temperature": options["temperature"],
            "prompts": options["prompts"].name if options["prompts"] else "built-in",
            "target": "SmolLM2-135M-Instruct",
            "draft": draft,
            "verifier_threads": options["verifier_threads"],
            "edge_threads": options["edge_threads"],
            "tokens_per_s": "all tokens over the time from the request to the last of them",
            "later_tokens_per_s": "tokens after the first arrival over the time after it",
            "beside": "drafted on the verifier's host; the measured round trip is added to what it took",
            "auto": "keeps what it has learnt between answers; auto_first knows nothing but one round trip",
            "emulation": "logits of the small model, time of the bigger one",
        },
        "links": {name: _link(link) for name, link in links.items()},
    }


def _link(link: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: link[key] for key in ("asked", "left_out", "calibration", "cannot", "link") if key in link}
    round_trip_s = _round_trip_s(link)
    return kept | {
        "targets": {
            kind: _target(kind, target, round_trip_s)
            for kind, target in link["targets"].items()
            if target["samples"]
        }
    }


def _round_trip_s(link: Mapping[str, Any]) -> float:
    measured = (link.get("calibration") or {}).get("measured", {}).get("rtt_ms")
    return float(measured if measured is not None else link["asked"]["rtt_ms"]) / 1e3


def _target(kind: str, target: Mapping[str, Any], round_trip_s: float) -> dict[str, Any]:
    samples: Mapping[str, Sequence[Sample]] = target["samples"]
    emulation = None if kind == REAL else parse_emulation(kind)
    arms = {
        name: _arm(group, round_trip_s if name.startswith("beside") else 0.0)
        for name, group in samples.items()
    }
    ratios = _ratios({name: arm["tokens_per_s"].median for name, arm in arms.items()})
    return {
        "emulation": target["emulation"],
        "dtype": target["dtype"],
        "failed": target["failed"],
        "arms": arms,
        "emulation_overrun": None if emulation is None else _overrun(samples, emulation),
        "ratios": ratios,
        "later_ratios": _ratios({name: arm["later_tokens_per_s"].median for name, arm in arms.items()}),
        "total_ratios": _ratios({name: arm["total_tokens_per_s"] for name, arm in arms.items()}),
        "auto_by_answer": _by_answer(samples, ratios.get("best_fixed")),
    }


def _arm(group: Sequence[Sample], delay_s: float) -> dict[str, Any]:
    num_tokens = sum(sample.num_tokens for sample in group)
    durations_s = [sample.num_tokens / sample.tokens_per_s + delay_s for sample in group]
    drafted = sum(sample.num_drafted for sample in group)
    gaps = [gap for sample in group for gap in sample.gaps_s]
    spread = [
        gap / num
        for sample in group
        for gap, num in zip(sample.gaps_s, sample.tokens_at, strict=True)
        for _ in range(num)
    ]
    return {
        "tokens_per_s": Spread.of(
            [sample.num_tokens / duration_s for sample, duration_s in zip(group, durations_s, strict=True)]
        ),
        "total_tokens_per_s": round(num_tokens / sum(durations_s), 3),
        "later_tokens_per_s": Spread.of([sample.later_tokens_per_s for sample in group]),
        "first_token_s": _percentiles([sample.first_token_s + delay_s for sample in group]),
        "inter_token_s": _percentiles(spread),
        "between_arrivals_s": _percentiles(gaps),
        "up_bytes_per_token": round(sum(sample.up_bytes for sample in group) / num_tokens, 1),
        "down_bytes_per_token": round(sum(sample.down_bytes for sample in group) / num_tokens, 1),
        "wasted_up_bytes_per_token": round(sum(sample.wasted_up_bytes for sample in group) / num_tokens, 1),
        "verifier_busy_s_per_token": round(sum(sample.busy_s for sample in group) / num_tokens, 5),
        "forward_s": _percentiles([forward for sample in group for forward in sample.forward_s]),
        "num_tokens": num_tokens,
        "cloud_tokens": sum(sample.cloud_tokens for sample in group),
        "stale_blocks": sum(sample.num_stale_blocks for sample in group),
        "acceptance": round(sum(s.num_accepted for s in group) / drafted, 4) if drafted else None,
        "draft_s_per_token": round(sum(s.draft_s for s in group) / drafted, 5) if drafted else None,
        "last_choice": group[-1].plan,
    }


def _overrun(samples: Mapping[str, Sequence[Sample]], emulation: StepEmulation) -> float | None:
    """How many times as long as asked the emulated passes took: 1 where this machine is fast enough."""
    ratios = [
        forward_s / emulation.seconds(num_tokens)
        for group in samples.values()
        for sample in group
        for forward_s, num_tokens in zip(sample.forward_s, sample.forward_tokens, strict=True)
    ]
    return round(statistics.median(ratios), 3) if ratios else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    if len(values) == 1:
        return {"p50": values[0], "p95": values[0]}
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": round(cuts[9], 5), "p95": round(cuts[18], 5)}


def _ratios(speeds: Mapping[str, float]) -> dict[str, Any]:
    """`auto` against the best fixed arm at the link and the verifier alone, and so on.

    Arms beside the target are no choice that the edge has, so they are not among the fixed ones.
    """
    waiting = {name: speed for name, speed in speeds.items() if name.startswith("wait")}
    ahead = {name: speed for name, speed in speeds.items() if name.startswith("ahead")}
    dense = {name: speed for name, speed in speeds.items() if name.startswith("dense")}
    cloud = {CLOUD_ONLY: speeds[CLOUD_ONLY]} if CLOUD_ONLY in speeds else {}
    fixed = waiting | ahead | dense | cloud
    found: dict[str, Any] = {}

    def ratio(name: str, top: Mapping[str, float], bottom: Mapping[str, float]) -> None:
        if top and bottom:
            found[name] = round(max(top.values()) / max(bottom.values()), 3)

    auto = {AUTO: speeds[AUTO]} if AUTO in speeds else {}
    beside = {name: speed for name, speed in speeds.items() if name.startswith("beside")}
    ratio("auto_vs_best_fixed", auto, fixed)
    ratio("auto_vs_cloud_only", auto, cloud)
    ratio("best_ahead_vs_best_waiting", ahead, waiting)
    ratio("best_fixed_vs_cloud_only", waiting | ahead, cloud)
    ratio("best_fixed_vs_beside", waiting | ahead, beside)
    ratio("auto_vs_beside", auto, beside)
    if fixed:
        found["best_fixed"] = max(fixed, key=lambda name: fixed[name])
    return found


def _by_answer(samples: Mapping[str, Sequence[Sample]], best: str | None) -> Spread | None:
    """`auto` against the best fixed arm, seed by seed: both write the same text there."""
    if best is None or AUTO not in samples:
        return None
    others = {sample.seed: sample.tokens_per_s for sample in samples[best]}
    ratios = [s.tokens_per_s / others[s.seed] for s in samples[AUTO] if s.seed in others]
    return Spread.of(ratios) if ratios else None


def tables(done: Mapping[str, Any]) -> list[Table]:
    """Two a target: tokens/s of every arm on every link, and what speculating from a distance is worth."""
    from rich.table import Table

    found: dict[str, Table] = {}
    worth: dict[str, Table] = {}
    for name, link in done["links"].items():
        for kind, target in link["targets"].items():
            arms = target["arms"]
            if kind not in found:
                title = f"{kind} ({target['emulation']})" if target["emulation"] else kind
                found[kind] = Table("link", *(_heading(arm) for arm in arms), title=f"{title}: tokens/s")
                worth[kind] = Table(*_WORTH, title=f"{title}: from a distance")
            found[kind].add_row(name, *(f"{arm['tokens_per_s'].median:.1f}" for arm in arms.values()))
            if CLOUD_ONLY in arms and "best_fixed_vs_cloud_only" in target["ratios"]:
                worth[kind].add_row(name, *_worth(arms, target["ratios"]))
    return [*found.values(), *worth.values()]


_WORTH = (
    "link",
    "best arm",
    "x cloud only",
    "auto x cloud only",
    "busy ms a token, alone",
    "best arm",
    "auto",
)


def _worth(arms: Mapping[str, Any], ratios: Mapping[str, Any]) -> list[str]:
    """Where speculation does not pay in latency, it may still save the verifier work."""
    distant = [name for name in arms if name.startswith(("wait", "ahead"))]
    best = max(distant, key=lambda name: arms[name]["tokens_per_s"].median)

    def busy(name: str) -> str:
        return f"{1e3 * arms[name]['verifier_busy_s_per_token']:.1f}" if name in arms else "-"

    auto = f"{ratios['auto_vs_cloud_only']:.2f}" if AUTO in arms else "-"
    gain = f"{ratios['best_fixed_vs_cloud_only']:.2f}"
    return [best, gain, auto, busy(CLOUD_ONLY), busy(best), busy(AUTO)]


def _heading(arm: str) -> str:
    return arm.replace("_", " ")
