from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloud_verifier.auth import Authenticator, Identity, Quota, hash_token, new_token, read_identities
from cloud_verifier.quotas import Bucket, Meter
from shared.faults import FaultKind, SpecwireError

ALICE = f'[identities.alice]\nsha256 = "{hash_token("a")}"\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_nobody_needs_a_token_where_none_are_asked_for():
    authenticator = Authenticator()
    assert authenticator.identify({}, {}).name == "anonymous"
    assert authenticator.identify({"authorization": "Bearer x"}, {}).name == "anonymous"
    assert authenticator.identify({}, {"x509_common_name": [b"carol"]}).name == "carol"


def test_a_token_names_its_bearer_and_brings_quotas(tmp_path):
    authenticator = Authenticator(
        write(tmp_path / "t", ALICE + "sessions = 2\ntokens-per-s = 1.5\nmax_context = 9\n")
    )
    identity = authenticator.identify({"authorization": "Bearer a"}, {})
    assert identity == Identity("alice", Quota(2, 1.5, 0, 9))
    assert authenticator.identify({"authorization": b"Bearer a"}, {}) == identity


@pytest.mark.parametrize("header", ["Bearer b", "Bearer ", "a", "Basic a", b"Bearer \xff"])
def test_other_tokens_are_refused(tmp_path, header):
    authenticator = Authenticator(write(tmp_path / "t", ALICE))
    with pytest.raises(SpecwireError) as caught:
        authenticator.identify({"authorization": header}, {"x509_common_name": [b"alice"]})
    assert caught.value.kind is FaultKind.UNAUTHENTICATED


def test_an_empty_hash_lets_nobody_in(tmp_path):
    authenticator = Authenticator(write(tmp_path / "t", "[identities.alice]\n"))
    with pytest.raises(SpecwireError):
        authenticator.identify({"authorization": "Bearer "}, {})
    assert authenticator.identify({}, {"x509_common_name": [b"alice"]}).name == "alice"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "Expected"),
        ("[tokens.a]", "tokens"),
        ('[identities.a]\nsha256 = "12"', "64"),
        ("[identities.a]\ncolour = 1", "colour"),
        ("[identities.a]\nsessions = -1", "sessions"),
        ("[identities.a]\nsessions = true", "sessions"),
        (ALICE + ALICE.replace("alice", "bob"), "same token"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, text, problem):
    with pytest.raises(SpecwireError, match=problem):
        read_identities(write(tmp_path / "t", text))


def test_the_file_is_read_again_when_it_changes(tmp_path):
    path = write(tmp_path / "t", ALICE)
    authenticator = Authenticator(path)
    write(path, ALICE.replace("alice", "anna"))
    os.utime(path, ns=(1, 1))
    assert authenticator.identify({"authorization": "Bearer a"}, {}).name == "anna"
    write(path, "broken")
    assert authenticator.identify({"authorization": "Bearer a"}, {}).name == "anna"
    path.unlink()
    assert authenticator.identify({"authorization": "Bearer a"}, {}).name == "anna"


def test_new_tokens_are_long_and_distinct():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) > 40


def test_a_bucket_lets_through_its_rate():
    bucket = Bucket(10.0, 100.0, 0.0)
    assert bucket.take(150, 0.0) == 0  # a large request once, on credit
    assert bucket.take(1, 0.0) == pytest.approx(5.0)
    assert bucket.take(1, 6.0) == 0
    assert bucket.take(1000, 1e6) == 0
    assert bucket.take(1, 1e6) == pytest.approx(90.0)


def test_the_meter_counts_each_identity_and_unit_apart():
    now = [0.0]
    meter = Meter(lambda: now[0])
    slow, fast = Identity("slow", Quota(tokens_per_s=1)), Identity("fast", Quota(bytes_per_s=100))
    meter.charge(slow, num_tokens=20, num_bytes=10**9)
    meter.charge(fast, num_tokens=10**9)
    with pytest.raises(SpecwireError, match="1 tokens a second") as caught:
        meter.charge(slow, num_tokens=1)
    assert caught.value.kind is FaultKind.QUOTA_EXCEEDED
    assert caught.value.retry_after_ms == 10_000
    now[0] = 11
    meter.charge(slow, num_tokens=1)
    meter.charge(Identity(), num_tokens=10**9, num_bytes=10**9)
