"""Prometheus metrics, under vLLM's names with our prefix where the thing is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily

from cloud_verifier.observer import Observer, PassRecord
from shared.faults import FaultKind
from shared.messages import Tokens, Verdict

if TYPE_CHECKING:
    from cloud_verifier.engine import Engine

PREFIX = "specwire"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _LoadCollector:
    """Gauges that are read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        load = self._engine.load()
        for name, text, value in (
            ("num_requests_running", "Sessions with a client", load.num_sessions),
            ("num_requests_waiting", "Sessions that wait for the model", load.num_waiting),
            ("num_sessions_known", "Those and sessions that wait to be resumed", self._engine.num_known),
            ("kv_cache_usage_perc", "Share of the key-value slots in use, in [0, 1]", load.kv_cache_usage),
            (
                "prefix_cache_usage_perc",
                "Share of the key-value slots that the prefix cache remembers, in [0, 1]",
                self._engine.cache_usage,
            ),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


class Metrics(Observer):
    """Counts what the engine reports. `registry` is what `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._is_ready = False
        self._drafts = self._counter("spec_decode_num_drafts", "Blocks judged")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens judged")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._sibling_tokens = self._counter(
            "spec_decode_num_sibling_tokens", "Tokens that followed a recovered one in the same round"
        )
        self._accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the block",
            "position",
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens committed to answers")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed")
        self._prefix_hits = self._counter("prefix_cache_hit_tokens", "Prompt tokens that were known already")
        self._replays = self._counter("session_replays", "Steps that came again and got their old answer")
        self._faults = self._counter("faults", "Sessions ended or refused, by kind of fault", "kind")
        self._wire_bytes = self._counter("wire_bytes", "Bytes of session messages", "direction", "codec")
        self._first_token = self._histogram("time_to_first_token_seconds", "From asking to the first token")
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between an answer's tokens, those of one verdict sharing its time"
        )
        self._round = self._histogram("round_seconds", "From a step's arrival to its reply")
        self._forward = self._histogram("forward_seconds", "Forward pass of the target")
        self._verification = self._histogram("verification_seconds", "Judging the blocks of a pass")
        self._batch_tokens = self._histogram("verify_batch_tokens", "Tokens in a pass", _TOKENS)
        self._batch_sessions = self._histogram("verify_batch_sessions", "Sessions in a pass", _TOKENS)
        self._busy = self._counter("busy_seconds", "Time that passes took in all")
        self._ready = Gauge(f"{PREFIX}_ready", "1 while sessions are taken", registry=self.registry)
        for kind in FaultKind:
            self._faults.labels(kind=kind.value)

    @property
    def alive(self) -> bool:
        """False once an engine has died; a model that is still loading is alive."""
        return self._engine is None or self._engine.is_alive

    @property
    def ready(self) -> bool:
        """Whether sessions are taken: model loaded and warmed up, not draining."""
        return self._is_ready and self._engine is not None and self._engine.is_alive

    def watch(self, engine: Engine) -> None:
        """Shows the load of an engine that serves from now on."""
        self._engine, self._is_ready = engine, True
        self.registry.register(_LoadCollector(engine))
        self._ready.set(1)

    def draining(self) -> None:
        self._is_ready = False
        self._ready.set(0)

    def bytes_passed(self, direction: str, codec: str, num_bytes: int) -> None:
        self._wire_bytes.labels(direction=direction, codec=codec or "none").inc(num_bytes)

    def passed(self, record: PassRecord) -> None:
        self._forward.observe(record.forward_s)
        self._verification.observe(record.verification_s)
        self._batch_tokens.observe(record.num_tokens)
        self._batch_sessions.observe(record.num_sessions)
        self._busy.inc(record.busy_s)
        self._prompt_tokens.inc(record.num_prefill_tokens)
        for answered in record.answered:
            self._count_reply(answered.reply, answered.num_drafted)
            self._round.observe(answered.round_s)
            if answered.first_token_s is not None:
                self._first_token.observe(answered.first_token_s)
            num_tokens = _num_tokens(answered.reply)
            if answered.since_last_s is not None and num_tokens:
                for _ in range(num_tokens):
                    self._inter_token.observe(answered.since_last_s / num_tokens)

    def replayed(self) -> None:
        self._replays.inc()

    def prefix_hit(self, num_tokens: int) -> None:
        self._prefix_hits.inc(num_tokens)

    def faulted(self, kind: FaultKind) -> None:
        self._faults.labels(kind=kind.value).inc()

    def _count_reply(self, reply: Verdict | Tokens, num_drafted: int) -> None:
        self._generation_tokens.inc(_num_tokens(reply))
        if isinstance(reply, Verdict):
            self._drafts.inc()
            self._draft_tokens.inc(num_drafted)
            self._accepted_tokens.inc(reply.num_accepted)
            self._sibling_tokens.inc(max(len(reply.tokens) - 1, 0))
            for position in range(reply.num_accepted):
                self._accepted_per_pos.labels(position=str(position)).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=self.registry)


def _num_tokens(reply: Verdict | Tokens) -> int:
    return len(reply.tokens) + (reply.num_accepted if isinstance(reply, Verdict) else 0)
