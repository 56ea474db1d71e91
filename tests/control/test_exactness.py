"""The plan is only a matter of speed: the same seed gives the same weights, bit for bit, under every plan."""

from __future__ import annotations

import pytest
from control_runs import DAGGER, RLPD, reach, small, trained, trees

from rlinf_embodied.runtime.session import SerialSession

PLANS = {
    "collocated on 1": (1, trees("all", "all", "all", "all")),
    "collocated on 2": (2, trees("all", "all", "all", "all")),
    "collocated on 3, uneven": (3, trees("all", "all", "all", "all")),
    "disaggregated on 2": (2, trees("0:1/2", "0:1/2", "1/2:1", "1/2:1")),
    "all apart": (4, trees([0], [1], [2], [3], shards=2)),
    "unlike splits": (3, trees([0, 1], [2], [0, 2], [1, 2], shards=2)),
}
VARIANTS = {"sac": small(), "rlpd": reach(*RLPD), "dagger": reach(*DAGGER)}
TELLING = {("sac", "collocated on 3, uneven"), ("sac", "disaggregated on 2"), ("sac", "unlike splits")}
TELLING |= {("rlpd", "unlike splits"), ("dagger", "all apart")}
CASES = [
    pytest.param(variant, plan, marks=() if (variant, plan) in TELLING else pytest.mark.slow)
    for variant in VARIANTS
    for plan in [*PLANS][1:]
]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple]:
    """What one worker gives, by variant."""
    return {name: trained(config, PLANS["collocated on 1"][1], 1, SerialSession()) for name, config in VARIANTS.items()}


@pytest.mark.parametrize(("variant", "plan"), CASES)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(alone, variant: str, plan: str) -> None:
    devices, tree = PLANS[plan]
    assert trained(VARIANTS[variant], tree, devices, SerialSession()) == alone[variant]


def test_demonstrations_and_labels_are_learned_from(alone) -> None:
    rows = alone["rlpd"][1]
    assert [row["rollout/demonstrations"] for row in rows] == [40, 80, 80, 80]
    assert [row["rollout/replay_size"] for row in rows] == [0, 0, 40, 80]
    assert [row["losses/updates"] for row in rows] == [0, 0, 0, 4]
    rows = alone["dagger"][1]
    assert [row["losses/updates"] for row in rows] == [0, 4, 4, 4]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        pytest.param("sac", "collocated on 2", marks=pytest.mark.slow),
        ("sac", "disaggregated on 2"),
        pytest.param("rlpd", "disaggregated on 2", marks=pytest.mark.slow),
        pytest.param("dagger", "collocated on 2", marks=pytest.mark.slow),
    ],
)
def test_ray_workers_give_the_weights_of_one_process(alone, ray_session, variant: str, plan: str) -> None:
    devices, tree = PLANS[plan]
    assert trained(VARIANTS[variant], tree, devices, ray_session) == alone[variant]
