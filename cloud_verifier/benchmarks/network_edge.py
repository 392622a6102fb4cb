"""The edge of `network`: runs on the client's host, one JSON line in for every answer, one out.

It stays alive over all arms of a link, so that models are loaded once and what the controller has learnt
serves the next answer, as in `edge-client chat`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cloud_verifier.benchmarks.edge import BenchEdge, TimedAnswer
from edge_client.controller import AutoController, Controller, FixedController, Plan
from edge_client.estimates import Estimates
from edge_client.results import Origin
from shared.faults import SpecwireError
from shared.messages import SamplingParams

AUTO, AUTO_FIRST = "auto", "auto_first"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of writing an answer; `plan` None leaves it to the controller.

    Args:
        beside: drafted on the verifier's own host, over loopback.
        max_tokens: of an answer, where more would only take long; 0: as many as the others.
        temperature: None: that of the others.
    """

    name: str
    plan: Plan | None
    codec: str = "lattice"
    beside: bool = False
    max_tokens: int = 0
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Durations in seconds; bytes with their framing, of the whole session."""

    seed: int
    num_tokens: int
    tokens_per_s: float  # from the request to the last token
    later_tokens_per_s: float  # after the first arrival, unless that was all
    first_token_s: float
    gaps_s: list[float]  # between arrivals
    tokens_at: list[int]  # that came after each gap
    up_bytes: int
    down_bytes: int
    wasted_up_bytes: int
    num_stale_blocks: int
    busy_s: float  # forward and verification of all rounds
    forward_s: list[float]
    forward_tokens: list[int]  # in each of these passes
    num_rounds: int
    num_drafted: int
    num_accepted: int
    draft_s: float
    plan: str  # the last one
    cloud_tokens: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="draft folder")
    parser.add_argument("--address", required=True, help="of the verifier, as seen from here")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(arguments)
    asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> None:
    edge = BenchEdge(options.draft, options.address, threads=options.threads)
    controllers = _Controllers(edge)
    _say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        try:
            if job["do"] == "describe":
                _say({"emulation": (await edge.describe()).emulation, "dtype": (await edge.describe()).dtype})
            else:
                _say(asdict(await _answer(edge, controllers, job)))
        except SpecwireError as error:
            _say({"error": str(error)})
    await edge.close()


class _Controllers:
    """`auto` keeps its controller, `auto_first` begins anew with what asking the verifier tells."""

    def __init__(self, edge: BenchEdge) -> None:
        self._edge = edge
        self._kept: AutoController | None = None

    async def get(self, arm: str, plan: Plan | None) -> Controller:
        if plan is not None:
            return FixedController(plan)
        if arm == AUTO and self._kept is not None:
            return self._kept
        description, round_trip_s = await self._edge.ask()
        estimates = Estimates(round_trip_s, description.load.forward_us / 1e6)
        controller = AutoController.within(description, estimates)
        if arm == AUTO:
            self._kept = controller
        return controller


async def _answer(edge: BenchEdge, controllers: _Controllers, job: dict[str, Any]) -> Sample:
    plan = None if job["plan"] is None else Plan(**job["plan"])
    controller = await controllers.get(job["arm"], plan)
    done = await edge.answer(
        edge.encode_chat(job["prompt"]),
        job["max_tokens"],
        sampling=SamplingParams(temperature=job["temperature"], seed=job["seed"]),
        controller=controller,
        codec=job["codec"],
        drafting=plan is None or not plan.cloud_tokens,
    )
    return _sample(done, controller, job["seed"])


def _sample(done: TimedAnswer, controller: Controller, seed: int) -> Sample:
    result, counts = done.result, done.result.counts
    # A verdict on a wholly kept block may bring nothing new to show, and an arrival without tokens is none.
    arrivals = [
        (at, len(e.tokens)) for at, e in zip(done.arrivals_s, done.emissions, strict=True) if e.tokens
    ]
    rounds = [emission.round for emission in done.emissions]
    speed = len(result.tokens) / arrivals[-1][0]
    later, later_s = len(result.tokens) - arrivals[0][1], arrivals[-1][0] - arrivals[0][0]
    return Sample(
        seed=seed,
        num_tokens=len(result.tokens),
        tokens_per_s=speed,
        later_tokens_per_s=later / later_s if later else speed,
        first_token_s=arrivals[0][0],
        gaps_s=[b[0] - a[0] for a, b in itertools.pairwise(arrivals)],
        tokens_at=[num for _, num in arrivals[1:]],
        up_bytes=result.up_bytes,
        down_bytes=result.down_bytes,
        wasted_up_bytes=result.wasted_up_bytes,
        num_stale_blocks=result.num_stale_blocks,
        busy_s=sum((r.timing.forward_us + r.timing.verification_us) / 1e6 for r in rounds),
        forward_s=[r.timing.forward_us / 1e6 for r in rounds[1:]],
        forward_tokens=[r.timing.batch_tokens for r in rounds[1:]],
        num_rounds=counts.num_rounds,
        num_drafted=counts.num_drafted,
        num_accepted=counts.num_accepted,
        draft_s=sum(r.draft_s + r.codec_s - r.prompt_s for r in rounds),
        plan=controller.explain(),
        cloud_tokens=counts.by_origin[Origin.CLOUD],
    )


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
