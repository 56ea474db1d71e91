"""The plan is only a matter of speed: the same seed gives the same weights, bit for bit, under every plan."""

from __future__ import annotations

import pytest
from control_runs import small, trained, trees

from rlinf_embodied.runtime.session import SerialSession

PLANS = {
    "collocated on 1": (1, trees("all", "all", "all", "all")),
    "collocated on 2": (2, trees("all", "all", "all", "all")),
    "collocated on 3, uneven": (3, trees("all", "all", "all", "all")),
    "disaggregated on 2": (2, trees("0:1/2", "0:1/2", "1/2:1", "1/2:1")),
    "all apart": (4, trees([0], [1], [2], [3], shards=2)),
    "unlike splits": (3, trees([0, 1], [2], [0, 2], [1, 2], shards=2)),
}
VARIANTS = {"sac": []}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple]:
    """What one worker gives, by variant."""
    return {
        name: trained(small(*words), PLANS["collocated on 1"][1], 1, SerialSession())
        for name, words in VARIANTS.items()
    }


@pytest.mark.parametrize("plan", [*PLANS][1:])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(alone, variant: str, plan: str) -> None:
    devices, tree = PLANS[plan]
    assert trained(small(*VARIANTS[variant]), tree, devices, SerialSession()) == alone[variant]


def test_another_seed_and_another_number_of_blocks_train_other_weights(alone) -> None:
    one = PLANS["collocated on 1"][1]
    found = {trained(small(word), one, 1, SerialSession())[0] for word in ("run.seed=4", "env.block_size=4")}
    assert len(found | {alone["sac"][0]}) == 3


@pytest.mark.ray
@pytest.mark.parametrize("plan", ["collocated on 2", "disaggregated on 2"])
def test_ray_workers_give_the_weights_of_one_process(alone, ray_session, plan: str) -> None:
    devices, tree = PLANS[plan]
    assert trained(small(), tree, devices, ray_session) == alone["sac"]
