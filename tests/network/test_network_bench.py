"""`make bench-network` in small: one link, few arms; over namespaces where they can be made, else a relay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloud_verifier.benchmarks.network_edge import Sample
from cloud_verifier.benchmarks.network_report import report, tables

PROFILES = """
[near]
about = "a test's"
source = "chosen"
rtt_ms = 20
rtt_tolerance_ms = 50
up = { rate_mbit = 20, queue_packets = 500 }
down = { rate_mbit = 20, queue_packets = 500 }

[recorded]
about = "a trace that is not there"
source = "chosen"
rtt_ms = 20
up = { trace = "none.up", queue_packets = 500 }
down = { trace = "none.down", queue_packets = 500 }
"""
ARMS = {
    "cloud_only",
    "wait_k4",
    "ahead_k4x3",
    "dense_f16_k4",
    "sampled_wait_k8",
    "beside_k4",
    "auto",
    "auto_first",
}
OPTIONS = {
    "tokens": 8,
    "seeds": 1,
    "temperature": 0.0,
    "prompts": None,
    "verifier_threads": 0,
    "edge_threads": 0,
}


def test_it_reports_what_it_promises(target_dir: Path, draft_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(PROFILES)
    out = tmp_path / "network.json"
    command = [sys.executable, "-m", "cloud_verifier.benchmarks.network", "--out", str(out)]
    command += ["--profile-file", str(tmp_path / "profiles.toml"), "--traces", str(tmp_path)]
    command += ["--profiles", "recorded", "near", "--targets", "300,1", "--arms", *sorted(ARMS)]
    command += ["--tokens", "8", "--seeds", "2", "--uncalibrated"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(out.read_text())
    for key in ("machine", "versions", "settings"):
        assert whole[key]
    assert "none" in whole["links"]["recorded"]["left_out"]
    near = whole["links"]["near"]
    assert near["asked"]["rtt_ms"] == 20
    target = near["targets"]["300,1"]
    assert target["emulation"] == "300 ms a pass and 1 ms a token"
    assert target["emulation_overrun"] >= 0.99
    assert set(target["arms"]) == ARMS
    for name, arm in target["arms"].items():
        assert arm["num_tokens"] == 16, name
        assert 0 < arm["first_token_s"]["p50"] <= arm["first_token_s"]["p95"]
        assert arm["tokens_per_s"]["n"] == 2
        assert arm["verifier_busy_s_per_token"] > 0.3 / 13
    assert not target["failed"]
    assert target["arms"]["cloud_only"]["cloud_tokens"] == 16
    assert target["arms"]["cloud_only"]["acceptance"] is None
    assert target["arms"]["wait_k4"]["cloud_tokens"] == 0
    assert target["arms"]["dense_f16_k4"]["up_bytes_per_token"] > 50_000
    assert target["arms"]["wait_k4"]["up_bytes_per_token"] < 1_000
    medians = {name: arm["tokens_per_s"]["median"] for name, arm in target["arms"].items()}
    fixed = {name: medians[name] for name in ("cloud_only", "wait_k4", "ahead_k4x3", "dense_f16_k4")}
    assert target["ratios"]["best_fixed"] == max(fixed, key=lambda name: fixed[name])
    assert target["ratios"]["auto_vs_cloud_only"] == pytest.approx(
        medians["auto"] / medians["cloud_only"], abs=1e-3
    )


def sample(tokens_per_s: float, seed: int) -> Sample:
    return Sample(
        seed=seed,
        num_tokens=5,
        tokens_per_s=tokens_per_s,
        later_tokens_per_s=tokens_per_s * 2,
        first_token_s=0.1,
        gaps_s=[0.4],
        tokens_at=[4],
        up_bytes=500,
        down_bytes=100,
        wasted_up_bytes=50,
        num_stale_blocks=1,
        busy_s=0.2,
        forward_s=[0.06],
        forward_tokens=[5],
        num_rounds=2,
        num_drafted=8,
        num_accepted=4,
        draft_s=0.08,
        plan="K=4",
    )


def test_ratios_are_of_medians_and_only_of_what_the_edge_could_choose() -> None:
    speeds = {
        "cloud_only": 10.0,
        "wait_k2": 12.0,
        "wait_k4": 8.0,
        "ahead_k4x3": 18.0,
        "beside_k4": 40.0,
        "dense_f16_k4": 9.0,
        "sampled_wait_k8": 90.0,
        "auto": 17.1,
    }
    samples = {
        name: [sample(speed / 2, 0), sample(speed, 1), sample(speed * 9, 2)] for name, speed in speeds.items()
    }
    samples["auto"].reverse()  # the order that they come in tells nothing
    links = {
        "x": {
            "asked": {"rtt_ms": 50.0},
            "calibration": {"measured": {"rtt_ms": 51.0}},
            "targets": {"70b": {"emulation": "slow", "dtype": "float32", "samples": samples, "failed": []}},
        }
    }
    whole = report(OPTIONS, links, "draft")
    target = whole["links"]["x"]["targets"]["70b"]
    assert target["ratios"] == {
        "auto_vs_best_fixed": 0.95,
        "auto_vs_cloud_only": 1.71,
        "best_ahead_vs_best_waiting": 1.5,
        "best_fixed_vs_cloud_only": 1.8,
        # Each of its answers of 5 tokens takes a round trip longer.
        "best_fixed_vs_beside": pytest.approx(18 / (5 / (5 / 40 + 0.051)), abs=1e-3),
        "auto_vs_beside": pytest.approx(17.1 / (5 / (5 / 40 + 0.051)), abs=1e-3),
        "best_fixed": "ahead_k4x3",
    }
    assert target["total_ratios"]["auto_vs_best_fixed"] == pytest.approx(0.95, abs=1e-3)
    assert target["auto_by_answer"].min == target["auto_by_answer"].max == pytest.approx(0.95)
    assert target["emulation_overrun"] == pytest.approx(0.06 / (0.0514 + 5 * 0.00088), abs=0.001)
    wait, beside = target["arms"]["wait_k2"], target["arms"]["beside_k4"]
    assert wait["inter_token_s"]["p50"] == pytest.approx(0.1)
    assert wait["total_tokens_per_s"] == pytest.approx(3 / (1 / 6 + 1 / 12 + 1 / 108), abs=1e-3)
    assert wait["between_arrivals_s"]["p50"] == pytest.approx(0.4)
    assert wait["up_bytes_per_token"] == 100
    assert wait["verifier_busy_s_per_token"] == pytest.approx(0.04)
    assert wait["acceptance"] == 0.5
    # What is written beside the target still has to reach the person.
    assert beside["first_token_s"]["p50"] == pytest.approx(0.1 + 0.051)
    assert tables(whole)[0].row_count == 1


def test_a_link_that_was_left_out_or_interrupted_is_still_reported() -> None:
    asked = {"rtt_ms": 600.0}
    links = {
        "geo": {"asked": asked, "targets": {}, "left_out": "misses its profile"},
        "lan": {"asked": asked, "targets": {"real": {"emulation": "", "dtype": "float32", "samples": {}}}},
    }
    whole = report(OPTIONS, links, "draft")
    assert whole["links"]["geo"] == {"asked": asked, "left_out": "misses its profile", "targets": {}}
    assert whole["links"]["lan"]["targets"] == {}
