"""Differences on the same episodes, against SciPy and by hand."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binomtest

from rlinf_embodied.telemetry.paired import PairedRate, paired_mean


def test_outcomes_are_counted_in_pairs() -> None:
    found = PairedRate.of([True, True, False, False, True], [True, False, True, False, False])
    assert found == PairedRate(both=1, only_a=2, only_b=1, neither=1)
    assert (found.number, found.difference) == (5, -0.2)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 5), (3, 14), (40, 90), (500, 570)])
def test_p_is_that_of_the_exact_binomial_test(a: int, b: int) -> None:
    expected = binomtest(min(a, b), a + b).pvalue if a + b else 1.0
    assert PairedRate(100, a, b, 7).p_value == pytest.approx(expected)


def test_interval_and_number_are_those_of_the_publications_by_hand() -> None:
    found = PairedRate(both=120, only_a=10, only_b=26, neither=44)  # n = 200
    # 10.5 and 26.5 of 202: d = 16 / 202, its standard error sqrt(37 - 256 / 202) / 202 = 0.029590
    assert found.interval == pytest.approx((0.079208 - 1.959964 * 0.029590, 0.079208 + 1.959964 * 0.029590), abs=1e-5)
    # q = 37 / 202 = 0.183168: ((1.959964 * 0.427982 + 0.841621 * sqrt(0.180668)) / 0.05)^2 = 572.9
    assert found.num_needed(0.05) == 573
    assert found.num_needed(0.2) == 37  # q = 0.2: no fewer differ than the difference itself
    same = PairedRate(90, 0, 0, 110)
    assert same.p_value == 1.0
    assert same.interval[0] == -same.interval[1] == pytest.approx(-1.959964 / 202)


def test_means_are_paired() -> None:
    assert paired_mean([1.0, 5.0], [1.0, 5.0]) == {"difference": 0.0, "difference_interval": [0.0, 0.0]}
    found = paired_mean([1.0, 5.0, 9.0], [2.0, 7.0, 12.0])  # 1, 2, 3
    half = 1.959964 / math.sqrt(3)
    assert found["difference_interval"] == pytest.approx([2 - half, 2 + half])
