"""The plan is only a matter of speed: the same seed gives the same weights, bit for bit, under every plan."""

from __future__ import annotations

import functools

import pytest
from placements import switching
from runs import GRPO, clone, digest, executor_for, iterate, tiny, trees

from rlinf_embodied.runtime.session import SerialSession, Session

PLANS = {
    "collocated on 1": (1, trees("all", "all", "all")),
    "collocated on 2": (2, trees("all", "all", "all")),
    "collocated on 3, uneven": (3, trees("all", "all", "all")),
    "disaggregated on 2": (2, trees("0:1/2", "1/2:1", "1/2:1", shards=2)),
    "disaggregated on 3": (3, trees("0:1/3", "1/3:2/3", "2/3:1", shards=2)),
    "hybrid on 2": (2, trees("0:1/2", "1/2:1", "all", shards=2)),
    "disaggregated on 2, switching": (2, switching(trees("0:1/2", "1/2:1", "1/2:1", 2), "env+policy", "actor")),
    "collocated on 2, switching": (2, switching(trees("all", "all", "all"), "env+policy", "actor")),
    "one env, policy on all": (2, trees([0], "all", "all")),
    "unlike splits": (3, trees([0, 1], [2], [0, 2], shards=2)),
    "shards in workers of their own": (6, trees([2, 3, 4, 5], [0, 1], [0, 1], shards=2)),
}
OVER_THREE, OVER_ONE = ([0, 1], [3, 1]), ([0, 1], [1, 3])

PLANS |= {
    "unlike shares": (2, trees(OVER_THREE, OVER_THREE, OVER_ONE)),
    "unlike shares of a loop's sides": (2, trees(OVER_THREE, OVER_ONE, OVER_ONE)),
}
# what changes the path through the code; the plans compared under each
VARIANTS = {
    "ppo": ([], [*PLANS][1:]),
    "ppo, chunk ratio": (["algorithm.ratio_level=chunk"], ["disaggregated on 2"]),
    "ppo, token ratio": (["algorithm.ratio_level=token"], ["collocated on 2"]),
    "ppo, critic from images": (["policy.critic=observation"], ["hybrid on 2"]),
    "ppo, bootstrap at time-outs from images": (
        ["algorithm.bootstrap_at_timeout=true", "policy.critic=observation"],
        ["disaggregated on 2"],
    ),
    "ppo, bootstrap at time-outs": (["algorithm.bootstrap_at_timeout=true"], ["collocated on 3, uneven"]),
    "ppo, carried over": (["env.carry_over=true"], ["unlike splits", "shards in workers of their own"]),
    "ppo, stops at a KL": (["algorithm.target_kl=1e-4"], ["collocated on 2"]),
    "ppo, no freezing": (["policy.options.freeze_stem=false"], ["disaggregated on 2"]),
    "grpo": (GRPO, ["collocated on 2", "disaggregated on 3", "unlike splits"]),
    "grpo, more minibatches than samples": ([*GRPO, "algorithm.num_minibatches=40"], ["collocated on 2"]),
    "grpo, token ratio": ([*GRPO, "algorithm.ratio_level=token"], ["hybrid on 2"]),
}
# in every run of the tests: uneven shares, switching, streaming, the learner on all devices, each algorithm's own paths
TELLING = {
    ("ppo", "collocated on 3, uneven"),
    ("ppo", "disaggregated on 2, switching"),
    ("ppo", "unlike splits"),
    ("ppo", "unlike shares of a loop's sides"),
    ("ppo, bootstrap at time-outs from images", "disaggregated on 2"),
    ("ppo, carried over", "unlike splits"),
    ("ppo, stops at a KL", "collocated on 2"),
    ("grpo", "disaggregated on 3"),
    ("grpo, token ratio", "hybrid on 2"),
}
CASES = [
    pytest.param(variant, plan, marks=() if (variant, plan) in TELLING else pytest.mark.slow)
    for variant, (_, plans) in VARIANTS.items()
    for plan in plans
]


def trained(variant: str, plan: str, session: Session) -> tuple[str, list[dict[str, float]]]:
    config, (devices, tree) = tiny(*VARIANTS[variant][0]), PLANS[plan]
    executor = executor_for(config, tree, devices, session, clone(config))
    metrics = iterate(executor, 3)
    return digest(executor), metrics


@functools.cache
def by_one_worker(variant: str) -> tuple[str, list[dict[str, float]]]:
    return trained(variant, "collocated on 1", SerialSession())


@pytest.mark.parametrize(("variant", "plan"), CASES)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(variant: str, plan: str) -> None:
    expected, metrics = by_one_worker(variant)
    found, found_metrics = trained(variant, plan, SerialSession())
    assert found == expected
    assert found_metrics == metrics


def test_grpo_fills_groups_up_by_further_rollouts() -> None:
    _, metrics = by_one_worker("grpo")
    assert max(m["rollout/rounds"] for m in metrics) > 1
    assert all(m["rollout/useful_groups"] == 4 for m in metrics)  # those beyond the four that a round has are left out


@pytest.mark.ray
@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        ("ppo", "collocated on 2"),
        pytest.param("ppo", "disaggregated on 2", marks=pytest.mark.slow),
        ("grpo", "disaggregated on 2"),
    ],
)
def test_ray_workers_give_the_weights_of_one_process(ray_session, variant: str, plan: str) -> None:
    expected, metrics = by_one_worker(variant)
    found, found_metrics = trained(variant, plan, ray_session)
    assert found == expected
    assert found_metrics == metrics
