"""The plan is only a matter of speed: completions, metrics and weights are equal bit for bit under every plan."""

from __future__ import annotations

import functools

import pytest
from math_runs import DAPO, PPO, TWO_STEPS, iterate_math, math_executor, tiny_math
from placements import leaves, switching
from runs import digest

from rlinf_embodied.runtime.session import SerialSession, Session


def of_file(name: str, chunks: int | None = None) -> list[dict]:
    """Returns the variants of a choice of the group `plan`, streaming in so many chunks."""
    variants = tiny_math(f"plan={name}").plan.variants
    if chunks is not None:
        variants[0]["items"] = [item.replace("in chunks", f"in {chunks} chunks") for item in variants[0]["items"]]
    return variants


STAGES = ("prompts", "generation", "reward", "old_log_probs?", "reference?", "critic?", "actor")


PLANS = {
    "collocated on 1": (1, of_file("collocated")),
    "collocated on 2": (2, of_file("collocated")),
    "collocated on 2, switching": (2, switching(of_file("collocated"), *STAGES)),
    "disaggregated on 2": (2, of_file("disaggregated")),
    "disaggregated on 4": (4, of_file("disaggregated")),
    "hybrid on 2": (2, of_file("hybrid")),
    "pipelined on 2, by blocks": (2, of_file("pipelined")),
    "pipelined on 2, by pairs": (2, of_file("pipelined", 2)),
    "pipelined on 4, by blocks": (4, of_file("pipelined")),
    "unlike splits": (
        3,
        leaves(
            prompts=[2], generation=[0, 1], reward=[0, 1, 2], old_log_probs_optional=[1, 2], reference_optional=[2],
            critic_optional=[0, 2], actor=[0, 1, 2],
        ),
    ),
}  # fmt: skip
# what changes the path through the code, and the plans that each is compared under
VARIANTS = {
    "grpo": ([], ["collocated on 2, switching", "pipelined on 2, by pairs", "unlike splits"]),
    "grpo, truncated masked": (["algorithm.mask_truncated=true", "generation.max_new_tokens=4"], ["collocated on 2"]),
    "grpo, sequences": (["algorithm.loss_level=sequence"], ["pipelined on 4, by blocks"]),
    "grpo, several steps": (TWO_STEPS, ["hybrid on 2"]),
    "grpo, reference": (["algorithm.kl_coef=0.1"], ["pipelined on 2, by blocks"]),
    "rloo": (["algorithm=rloo"], ["disaggregated on 2"]),
    "dapo": (DAPO, ["disaggregated on 4"]),
    "ppo": (PPO, ["collocated on 2, switching"]),
    "ppo, several steps, reference": ([*PPO, *TWO_STEPS, "algorithm.kl_coef=0.1"], ["unlike splits"]),
    "lora": (["policy.lora.rank=4"], ["disaggregated on 2"]),
}
CASES = [(variant, plan) for variant, (_, plans) in VARIANTS.items() for plan in plans]

Trained = tuple[str, list[dict[str, float]]]


def trained(variant: str, plan: str, session: Session) -> Trained:
    devices, trees = PLANS[plan]
    config = tiny_math(*VARIANTS[variant][0])
    executor = math_executor(config, trees, devices, session)
    # a second iteration is sampled with new weights; the first of PPO trains the critic alone
    metrics = iterate_math(config, executor, 3 if variant.startswith(("ppo", "dapo")) else 2)
    return digest(executor), metrics


@functools.cache
def by_one_worker(variant: str) -> Trained:
    return trained(variant, "collocated on 1", SerialSession())


@pytest.mark.parametrize(("variant", "plan"), CASES)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(variant: str, plan: str) -> None:
    expected, metrics = by_one_worker(variant)
    found, found_metrics = trained(variant, plan, SerialSession())
    assert found_metrics == metrics
    assert found == expected


def test_dynamic_sampling_fills_the_batch_up_by_further_rounds() -> None:
    _, metrics = by_one_worker("dapo")
    assert max(m["rollout/rounds"] for m in metrics) > 2
    for m in metrics:
        full = m["rollout/rounds"] < 5  # those beyond the 8 that an iteration trains on are left out
        assert m["rollout/useful_groups"] == 8 if full else 0 < m["rollout/useful_groups"] <= 8
        assert m["rollout/completions"] == 32 * m["rollout/rounds"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("variant", "plan"),
    [
        ("ppo, several steps, reference", "hybrid on 2"),
        pytest.param("dapo", "disaggregated on 2", marks=pytest.mark.slow),
    ],
)
def test_ray_workers_give_the_weights_of_one_process(ray_session, variant: str, plan: str) -> None:
    expected, metrics = by_one_worker(variant)
    found, found_metrics = trained(variant, plan, ray_session)
    assert found_metrics == metrics
    assert found == expected
