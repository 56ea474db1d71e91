"""Snapshots take at most their share of the time of training."""

from __future__ import annotations

import pytest

from rlinf_embodied.execution.snapshots import Pace


@pytest.mark.parametrize(("cost_s", "iteration_s", "period"), [(0.4, 10.0, 1), (0.6, 10.0, 2), (84.0, 60.0, 28)])
def test_a_snapshot_is_due_as_soon_as_it_costs_no_more_than_its_share(cost_s, iteration_s, period) -> None:
    pace = Pace(0.05)
    pace.taken(cost_s)
    due = [pace.is_due(iteration_s) for _ in range(period)]
    assert due == [*[False] * (period - 1), True]
    assert cost_s <= 0.05 * period * iteration_s
