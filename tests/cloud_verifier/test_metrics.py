"""What the operator sees: every metric under its name, the dashboard in step with them, the HTTP port."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from verifier_support import Client, prompts, request, running, until

from cloud_verifier.http import operator_port
from cloud_verifier.metrics import Metrics
from cloud_verifier.target_model import TargetModel
from shared.faults import FaultKind, SpecwireError

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "verifiers.json"

PROMISED = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_sibling_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_sessions_known",
    "prefix_cache_usage_perc",
    "wire_bytes_total",
    "verify_batch_tokens_count",
    "round_seconds_count",
    "forward_seconds_count",
    "prefix_cache_hit_tokens_total",
    "session_replays_total",
    "faults_total",
]


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target), dtype="float32", num_slots=2048)


@pytest.fixture(scope="module")
def used(model) -> dict[str, float]:
    """Samples after one session of every kind of event."""
    metrics = Metrics()
    prompt = prompts(1, 30)[0]
    with running(model, observer=metrics) as engine:
        metrics.watch(engine)
        client = Client(engine)
        client.open(request(prompt, 40))
        written = client.generate(5)
        block = client.send_block([1, 2, 3])
        client.verdict(block)
        client.ticket.submit(block)
        client.get()
        again = Client(engine)
        again.open(request([*prompt, *written], 40))
        for _ in range(4):
            again.verdict(again.send_block(_greedy(again, engine)))
        again.send_block([1], step=50)
        assert again.fault().kind is FaultKind.OUT_OF_ORDER
        metrics.bytes_passed("up", "lattice", 100)
        until(lambda: engine.load().num_sessions == 1)
        return samples(metrics)


def _greedy(client: Client, engine) -> list[int]:
    """Two tokens that will be accepted, found out by a session that writes alone."""
    scout = Client(engine)
    tokens = scout.answer(client.committed, 2)
    return tokens


def samples(metrics: Metrics) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in generate_latest(metrics.registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_every_promised_metric_is_there(used):
    names = {name.partition("{")[0].removeprefix("specwire_") for name in used}
    assert not set(PROMISED) - names


def test_counts_are_right(used):
    assert used["specwire_spec_decode_num_drafts_total"] == 5
    assert used["specwire_spec_decode_num_draft_tokens_total"] == 3 + 4 * 2
    assert used['specwire_spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 4
    assert used["specwire_session_replays_total"] == 1
    assert used['specwire_faults_total{kind="out_of_order"}'] == 1
    assert used["specwire_prefix_cache_hit_tokens_total"] > 30
    assert used['specwire_wire_bytes_total{codec="lattice",direction="up"}'] == 100
    assert used["specwire_num_requests_running"] == 1
    assert used["specwire_generation_tokens_total"] >= 5 + 4 * 3
    first_tokens = used["specwire_time_to_first_token_seconds_count"]
    assert first_tokens == 2 + 4  # two sessions and four scouts
    assert used["specwire_inter_token_latency_seconds_count"] == used[
        "specwire_generation_tokens_total"
    ] - first_tokens - _rest_of_first_blocks(used)
    assert 0 < used["specwire_prefix_cache_usage_perc"] < used["specwire_kv_cache_usage_perc"] < 1
    assert used["specwire_num_sessions_known"] == 1


def _rest_of_first_blocks(used: dict[str, float]) -> int:
    """A block that begins an answer brings several tokens, but only one first."""
    return 2


def test_the_dashboard_shows_metrics_that_exist(used):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"specwire_\w+", expression)}
    known = {name.partition("{")[0] for name in used}
    assert shown
    assert not shown - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_operators_port(model):
    metrics = Metrics()
    with (
        operator_port(
            "127.0.0.1:0", metrics.registry, is_alive=lambda: metrics.alive, is_ready=lambda: metrics.ready
        ) as port,
    ):
        assert fetch(port, "/livez") == (200, "ok\n")
        assert fetch(port, "/readyz")[0] == 503  # the model is still loading
        assert fetch(port, "/else")[0] == 404
        with running(model, observer=metrics) as engine:
            metrics.watch(engine)
            assert fetch(port, "/readyz") == (200, "ok\n")
            assert "specwire_ready 1.0" in fetch(port, "/metrics")[1]
            metrics.draining()
            assert fetch(port, "/readyz")[0] == 503
            assert fetch(port, "/livez")[0] == 200
        assert fetch(port, "/livez")[0] == 503  # the engine has ended


def test_a_bad_metrics_address_is_one_sentence():
    for address in ("nonsense", "127.0.0.1:99999999", "203.0.113.1:80"):
        port = operator_port(address, Metrics().registry, is_alive=bool, is_ready=bool)
        with pytest.raises(SpecwireError), port:
            pass
