"""The controller on simulated links, as a table in Markdown.

python tests/edge_client/simulated_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "deploy")]

from netlab.profiles import load_profiles  # noqa: E402
from simulated_link import FIXED, Link, mean_speed  # noqa: E402

from edge_client.controller import AutoController, FixedController  # noqa: E402
from edge_client.estimates import Estimates  # noqa: E402

TARGETS = {"small": (0.022, 0.0015), "70b": (0.0514, 0.00088)}  # seconds of a pass, and of each of its tokens
KEPT = (0.96, 0.72)
DRAFT_S = 0.006
TOKENS, ANSWERS = 128, 12


def line(name: str, target: str, link: Link) -> str:
    speeds = {plan: mean_speed(lambda plan=plan: FixedController(plan), link, TOKENS) for plan in FIXED}
    cloud = next(speed for plan, speed in speeds.items() if plan.cloud_tokens)
    best = {
        waits: max(
            speed for plan, speed in speeds.items() if not plan.cloud_tokens and (plan.ahead == 0) is waits
        )
        for waits in (True, False)
    }
    known = (link.round_trip, link.judge(4))
    auto = mean_speed(lambda: AutoController(estimates=Estimates(*known)), link, TOKENS, answers=ANSWERS)
    numbers = [cloud, best[True], best[False], auto]
    ratios = [auto / max(speeds.values()), auto / cloud]
    cells = [name, target, f"{link.kept}", *(f"{n:.0f}" for n in numbers), *(f"{r:.2f}" for r in ratios)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    heads = (
        "link, target, kept, cloud only, best wait, best ahead, auto, auto / best fixed, auto / cloud only"
    )
    print(f"| {' | '.join(heads.split(', '))} |\n{'| --- ' * 9}|")
    for name, profile in load_profiles().items():
        if profile.up.rate_mbit is None:
            continue  # a recorded trace
        for target, (base, per_token) in TARGETS.items():
            for kept in KEPT:
                link = Link(
                    profile.rtt_ms / 1e3,
                    DRAFT_S,
                    base,
                    per_token,
                    kept,
                    jitter=profile.up.jitter_ms / 1e3,
                    up_rate=profile.up.rate_mbit * 1e6 / 8,
                )
                print(line(name, target, link), flush=True)


if __name__ == "__main__":
    main()
