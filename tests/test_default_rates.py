"""Peak learning rates by a model's size."""

import pytest

from trainer.inputs import LORA_FACTOR, SUITED, suited_rate


@pytest.mark.parametrize("kind", SUITED)
def test_the_rate_of_a_point_is_the_points_it_is_level_beyond_the_ends_and_never_rises(kind):
    points = SUITED[kind]
    for size, rate in points:
        assert suited_rate(kind, size) == pytest.approx(rate, rel=1e-9)
    assert suited_rate(kind, 10) == points[0][1]
    assert suited_rate(kind, 70e9) == points[-1][1]
    rates = [suited_rate(kind, 10 ** (x / 10)) for x in range(50, 105)]
    assert rates == sorted(rates, reverse=True)
    assert suited_rate(kind, 5e8) <= 2e-5  # a pretrained 0.5B model must not get the demo's rate


def test_between_two_points_the_line_is_straight_in_logarithms_and_adapters_get_more(monkeypatch):
    monkeypatch.setitem(SUITED, "actor", ((1e6, 1e-3), (1e8, 1e-5)))
    assert suited_rate("actor", 1e7) == pytest.approx(1e-4)
    assert suited_rate("actor", 3.1623e7) == pytest.approx(3.2e-5)  # 10^-4.5, of two digits
    assert LORA_FACTOR > 1
    assert suited_rate("actor", 1e7, lora=True) == pytest.approx(LORA_FACTOR * 1e-4)
