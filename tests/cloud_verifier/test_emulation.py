"""What `--emulate-step` understands, and that its presets agree with what was published."""

import pytest

from cloud_verifier.emulation import PRESETS, parse_emulation
from shared.faults import SpecwireError


@pytest.mark.parametrize(("preset", "tokens_per_s"), [("7b", 104.9), ("70b", 19.13)])
def test_presets_take_the_published_time_for_one_token(preset, tokens_per_s):
    assert 1 / PRESETS[preset].seconds(1) == pytest.approx(tokens_per_s, rel=0.005)


@pytest.mark.parametrize(("preset", "weights_gb", "parameters"), [("7b", 13.5, 6.74e9), ("70b", 69, 69e9)])
def test_presets_keep_to_the_data_sheet(preset, weights_gb, parameters):
    emulation = PRESETS[preset]
    bandwidth, peak = 2039.0, 312e12
    assert emulation.base_ms >= weights_gb / bandwidth * 1e3
    assert emulation.per_token_ms == pytest.approx(2 * parameters / (peak / 2) * 1e3, rel=0.05)


def test_names_numbers_and_nothing():
    assert parse_emulation("") is None
    assert parse_emulation("70B") is PRESETS["70b"]
    by_hand = parse_emulation("25,0.4")
    assert by_hand is not None
    assert by_hand.seconds(10) == pytest.approx(0.029)
    assert str(by_hand) == "25 ms a pass and 0.4 ms a token"
    assert str(PRESETS["70b"]).startswith("Llama-2-70B, 8 bits, one A100-80GB: ")


@pytest.mark.parametrize("text", ["fast", "25", "25,0.4,1", "-1,0", "405b"])
def test_anything_else_is_refused(text):
    with pytest.raises(SpecwireError, match="neither 7b nor 70b nor BASE_MS,PER_TOKEN_MS"):
        parse_emulation(text)
