"""Options that only the command line sets."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from edge_client.options import Options
from shared.faults import FaultKind, SpecwireError


def test_the_weight_of_fused_verification_reaches_the_request_and_is_checked():
    assert Options().sampling().fused_weight == 0.0
    fused = Options(temperature=1.0, verification="fused", fused_weight=0.25)
    assert fused.sampling().fused_weight == 0.25
    with pytest.raises(SpecwireError, match="out of range") as raised:
        Options(verification="fused", fused_weight=1.5).sampling()
    assert raised.value.kind is FaultKind.BAD_SAMPLING


@pytest.mark.parametrize("verification", ["", "token", "block", "coupled", "greedy"])
def test_the_weight_of_fused_verification_is_refused_with_another(verification):
    with pytest.raises(SpecwireError, match="only fused verification") as raised:
        Options(verification=verification, fused_weight=0.25).sampling()
    assert raised.value.kind is FaultKind.BAD_SAMPLING
    assert "lossy" in raised.value.remedy


def test_greedy_verification_of_a_temperature_is_refused_before_anything_is_loaded():
    assert Options(verification="greedy").sampling().temperature == 0.0
    with pytest.raises(SpecwireError, match="Greedy"):
        Options(verification="greedy", temperature=0.5).sampling()


def test_the_help_says_that_a_weight_is_lossy():
    hint = get_type_hints(Options, include_extras=True)["fused_weight"]
    assert "lossy" in hint.__metadata__[0].help
