"""Options that only the command line sets."""

from __future__ import annotations

import pytest

from edge_client.options import Options
from shared.faults import FaultKind, SpecwireError


def test_the_weight_of_fused_verification_reaches_the_request_and_is_checked():
    assert Options().sampling().fused_weight == 0.0
    assert Options(temperature=1.0, fused_weight=0.25).sampling().fused_weight == 0.25
    with pytest.raises(SpecwireError) as raised:
        Options(fused_weight=1.5).sampling()
    assert raised.value.kind is FaultKind.BAD_SAMPLING
