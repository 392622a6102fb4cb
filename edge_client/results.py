"""What an answer gives as it comes, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from edge_client.session import Traffic
from shared.messages import FinishReason, Logprobs, Timing


class Origin(StrEnum):
    """Where a token came from; DESIGN.md section 2."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    SIBLING = "sibling"
    CLOUD = "cloud"
    EDGE_ONLY = "edge_only"  # the draft's own, with no verifier in reach; never exact

    @property
    def label(self) -> str:
        """For people."""
        return self.value.replace("_", " ")


class Loss(StrEnum):
    """Why an answer is not distributed as the target's own text."""

    VERIFICATION = "verification"  # the rule that judged does not keep the target's distribution
    EDGE_ONLY = "edge_only"  # the draft wrote some of it alone
    PROMPT = "prompt"  # so it did with some of what the answer follows


@dataclass(frozen=True, slots=True)
class Round:
    """One block up and one verdict down, or one message of a cloud-only answer (num_drafted 0).

    `draft_s` and `codec_s` are what this block took to draft, `prompt_s` the part of it that was spent on
    reading what came before; `wait_s` is how long nothing else was done while its verdict was awaited.
    Before it the edge read `num_read` tokens of a text in `read_s`, which is in `draft_s` as `prompt_s` says.
    `num_before` blocks were in flight when it was drafted; `more`: another was promised to follow.
    `since_last_s` is the time from the answer's previous round to this one, 0 for the first.
    `confidences` are the draft's probabilities of its tokens, where they were asked for.
    """

    num_drafted: int
    num_accepted: int
    up_bytes: int
    down_bytes: int
    draft_s: float
    codec_s: float
    round_trip_s: float
    wait_s: float
    timing: Timing
    prompt_s: float = 0.0
    num_read: int = 0
    read_s: float = 0.0
    num_before: int = 0
    more: bool = False
    since_last_s: float = 0.0
    confidences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Emission:
    """New tokens, in order, with where each came from; committed ones unless they are `Origin.EDGE_ONLY`."""

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    round: Round
    logprobs: Logprobs | None = None
    losses: frozenset[Loss] = frozenset()

    @property
    def is_edge_only(self) -> bool:
        return Loss.EDGE_ONLY in self.losses


@dataclass(slots=True)
class TimeShare:
    """Seconds of an answer by what they were spent on; they sum to the answer's duration.

    While a verdict is awaited, the verifier's own durations are taken off first; what is left of the
    wait is the network's.
    """

    draft: float = 0.0
    codec: float = 0.0  # sampling, quantising, encoding
    network: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    verification: float = 0.0
    rest: float = 0.0

    def add_wait(self, wait_s: float, timing: Timing) -> None:
        for name, micros in (
            ("forward", timing.forward_us),
            ("verification", timing.verification_us),
            ("queue", timing.queue_us),
        ):
            part = min(micros / 1e6, wait_s)
            setattr(self, name, getattr(self, name) + part)
            wait_s -= part
        self.network += wait_s

    def close(self, total_s: float) -> None:
        known = self.draft + self.codec + self.network + self.queue + self.forward + self.verification
        self.rest = max(total_s - known, 0.0)


@dataclass(slots=True)
class Counts:
    """Sums over the rounds of an answer.

    `accepted_at[i]` counts blocks whose drafted token i was kept, `drafted_at[i]` blocks that had one;
    stale blocks are in neither.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    by_origin: dict[Origin, int] = field(default_factory=lambda: dict.fromkeys(Origin, 0))

    @property
    def num_speculated(self) -> int:
        """Tokens that rounds gave, not one side alone."""
        return sum(self.by_origin.values()) - self.by_origin[Origin.CLOUD] - self.by_origin[Origin.EDGE_ONLY]

    def add(self, emission: Emission) -> None:
        for origin in emission.origins:
            self.by_origin[origin] += 1
        done = emission.round
        if not done.num_drafted:
            return
        self.num_rounds += 1
        self.num_drafted += done.num_drafted
        self.num_accepted += done.num_accepted
        missing = done.num_drafted - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for index in range(done.num_drafted):
            self.drafted_at[index] += 1
            self.accepted_at[index] += index < done.num_accepted


@dataclass(frozen=True, slots=True)
class Result:
    """An answer that has ended. Bytes are those of messages with gRPC's and HTTP/2's framing; `emulation` is
    the bigger model whose times these are, where the verifier waits as one would."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    time_share: TimeShare
    total_s: float
    first_token_s: float
    up_bytes: int
    down_bytes: int
    wasted_up_bytes: int
    num_stale_blocks: int
    num_reconnects: int
    losses: frozenset[Loss]
    emulation: str = ""

    @property
    def lossy(self) -> bool:
        return bool(self.losses)

    @property
    def tokens_per_s(self) -> float:
        return len(self.tokens) / self.total_s if self.total_s else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the judged drafted tokens that were kept."""
        return self.counts.num_accepted / max(self.counts.num_drafted, 1)

    @property
    def tokens_per_round(self) -> float:
        return self.counts.num_speculated / max(self.counts.num_rounds, 1)

    @property
    def up_bytes_per_draft_token(self) -> float:
        return self.up_bytes / max(self.counts.num_drafted, 1)


@dataclass(slots=True)
class Tally:
    """An answer as it grows. `started` is by `time.perf_counter`; `traffic` and `emulation` are set by who
    had a session."""

    started: float
    tokens: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    share: TimeShare = field(default_factory=TimeShare)
    finish: FinishReason = FinishReason.NONE
    first_token_s: float = 0.0
    losses: set[Loss] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)
    emulation: str = ""

    def add(self, emission: Emission) -> None:
        self.counts.add(emission)
        self.tokens += emission.tokens
        self.losses |= emission.losses
        if emission.tokens and not self.first_token_s:
            self.first_token_s = time.perf_counter() - self.started

    def result(self) -> Result:
        total_s = time.perf_counter() - self.started
        self.share.close(total_s)
        return Result(
            tokens=tuple(self.tokens),
            finish_reason=self.finish,
            counts=self.counts,
            time_share=self.share,
            total_s=total_s,
            first_token_s=self.first_token_s,
            up_bytes=self.traffic.up_bytes,
            down_bytes=self.traffic.down_bytes,
            wasted_up_bytes=self.traffic.wasted_up_bytes,
            num_stale_blocks=self.traffic.num_stale_blocks,
            num_reconnects=self.traffic.num_reconnects,
            losses=frozenset(self.losses),
            emulation=self.emulation,
        )
