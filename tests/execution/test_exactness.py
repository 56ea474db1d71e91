"""The plan is only a matter of speed: the same seed gives the same weights, bit for bit, under every plan."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from control_runs import DAGGER, RECAP, RLPD, reach, small
from hierarchical_runs import digests, placed, two_levels
from math_runs import DAPO, PPO, TWO_STEPS, tiny_math
from placements import leaves, looped, switching
from runs import GRPO, executor_for, iterate, tiny, trees

from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.execution import executor
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.runtime.session import Ref, SerialSession, Session

ONE = "collocated on 1"
Plans = Mapping[str, tuple[int, list[dict]]]  # number of devices, and the variants of a plan

# --------------------------------------------------------------------------------------------------------------- plans
OVER_THREE, OVER_ONE = ([0, 1], [3, 1]), ([0, 1], [1, 3])
PLANS: Plans = {
    ONE: (1, trees("all", "all", "all")),
    "collocated on 2": (2, trees("all", "all", "all")),
    "collocated on 3, uneven": (3, trees("all", "all", "all")),
    "disaggregated on 2": (2, trees("0:1/2", "1/2:1", "1/2:1", shards=2)),
    "disaggregated on 3": (3, trees("0:1/3", "1/3:2/3", "2/3:1", shards=2)),
    "learner apart": (3, trees("0:2/3", "0:2/3", "2/3:1")),
    "hybrid on 2": (2, trees("0:1/2", "1/2:1", "all", shards=2)),
    "disaggregated on 2, switching": (2, switching(trees("0:1/2", "1/2:1", "1/2:1", 2), "env+policy", "actor")),
    "collocated on 2, switching": (2, switching(trees("all", "all", "all"), "env+policy", "actor")),
    "one env, policy on all": (2, trees([0], "all", "all")),
    "unlike splits": (3, trees([0, 1], [2], [0, 2], shards=2)),
    "shards in workers of their own": (6, trees([2, 3, 4, 5], [0, 1], [0, 1], shards=2)),
    "unlike shares": (2, trees(OVER_THREE, OVER_THREE, OVER_ONE)),
    "unlike shares of a loop's sides": (2, trees(OVER_THREE, OVER_ONE, OVER_ONE)),
}


def with_replay(env: object, policy: object, replay: object, learner: object, shards: int = 1) -> list[dict]:
    return looped(env, policy, shards, replay=replay, actor=learner)


REPLAY_PLANS: Plans = {
    ONE: (1, with_replay("all", "all", "all", "all")),
    "collocated on 2": (2, with_replay("all", "all", "all", "all")),
    "collocated on 3, uneven": (3, with_replay("all", "all", "all", "all")),
    "disaggregated on 2": (2, with_replay("0:1/2", "0:1/2", "1/2:1", "1/2:1")),
    "all apart": (4, with_replay([0], [1], [2], [3], shards=2)),
    "unlike splits": (3, with_replay([0, 1], [2], [0, 2], [1, 2], shards=2)),
}
LEVEL_PLANS: Plans = {
    ONE: (1, placed("all", "all", "all", "all")),
    "collocated on 2": (2, placed("all", "all", "all", "all")),
    "all apart, two shards": (4, placed([0], [1], [2], [3], shards=2)),
    "the policy with the learners": (3, placed([0, 1], [2], [2], [1, 2])),
}


def of_file(name: str, chunks: int | None = None) -> list[dict]:
    """Returns the variants of a choice of the group `plan`, streaming in so many chunks."""
    variants = tiny_math(f"plan={name}").plan.variants
    if chunks is not None:
        variants[0]["items"] = [item.replace("in chunks", f"in {chunks} chunks") for item in variants[0]["items"]]
    return variants


STAGES = ("prompts", "generation", "reward", "old_log_probs?", "reference?", "critic?", "actor")
MATH_PLANS: Plans = {
    ONE: (1, of_file("collocated")),
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
    "tool and engine apart": (3, [{"items": ["episodes on 0 | generation on 1,2", "reward on all", "actor on 0,1"]}]),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ variants
@dataclass(frozen=True)
class Variant:
    """What changes the path through the code, and the plans that are compared under it."""

    config: Callable[..., TrainConfig | MathConfig]
    words: Sequence[str]
    plans: Plans
    compared: Sequence[str]
    iterations: int = 3
    staleness: int = 0


acting = functools.partial(Variant, tiny, plans=PLANS)
replaying = functools.partial(Variant, plans=REPLAY_PLANS, compared=[*REPLAY_PLANS][1:], iterations=4)
# a second iteration is sampled with new weights; the first of PPO trains the critic alone
math = functools.partial(Variant, tiny_math, plans=MATH_PLANS, iterations=2)
SEEN = ["algorithm.bootstrap_at_timeout=true", "policy.critic=observation"]
STALE = ["algorithm.tis_cap=2.0", "run.num_iterations=4"]
STALE_MATH = [*STALE, "algorithm.lr_end_fraction=1.0"]
CARRIED = "env.carry_over=true"
FLOW = [
    *("policy=flow_vla", "policy.temperature=0.5", "policy.options.expert_size=32"),
    "algorithm.critic_warmup_iterations=0",
]
LATE = [  # chunks that start late, and continue each other
    *("env.execute_steps=2", "env.chunks_per_rollout=8", "env.rtc=linear", "env.perturb.inference_delay=1"),
    *("env.perturb.inference_jitter=1", "policy.options.noise=flow_noise"),
]
VIEWS = [f"env={Path(__file__).resolve().parents[1] / 'two_views.yaml'}", *SEEN[:1]]
PICK = [
    *("env=maniskill_pick", "env.num_envs=4", "env.block_size=2", "env.obs_size=32", "env.chunk=5", "env.horizon=10"),
    *("env.chunks_per_rollout=3", "warm_start.from_scratch=true", "algorithm.critic_warmup_iterations=0"),
]
INSTRUCTED = [
    *("policy=tiny_vla", "env.cameras=[base_camera]", "warm_start.from_scratch=true"),
    *("hierarchy.instructions=[go up,go down]", "hierarchy.goal_low=-", "hierarchy.goal_high=-"),
    "hierarchy.columns=-",
]
VARIANTS: dict[str, Variant] = {
    "ppo": acting([], compared=[*PLANS][1:]),
    "ppo, chunk ratio": acting(["algorithm.ratio_level=chunk"], compared=["disaggregated on 2"]),
    "ppo, token ratio": acting(["algorithm.ratio_level=token"], compared=["collocated on 2"]),
    "ppo, critic from images": acting(["policy.critic=observation"], compared=["hybrid on 2"]),
    "ppo, bootstrap at time-outs from images": acting(SEEN, compared=["disaggregated on 2"]),
    "ppo, bootstrap at time-outs": acting(SEEN[:1], compared=["collocated on 3, uneven"]),
    "ppo, carried over": acting([CARRIED], compared=["unlike splits", "shards in workers of their own"]),
    "ppo, stops at a KL": acting(["algorithm.target_kl=1e-4"], compared=["collocated on 2"]),
    "ppo, no freezing": acting(["policy.options.freeze_stem=false"], compared=["disaggregated on 2"]),
    "grpo": acting(GRPO, compared=["collocated on 2", "disaggregated on 3", "unlike splits"]),
    "grpo, more minibatches than samples": acting(
        [*GRPO, "algorithm.num_minibatches=40"], compared=["collocated on 2"]
    ),
    "grpo, token ratio": acting([*GRPO, "algorithm.ratio_level=token"], compared=["hybrid on 2"]),
    "flow": acting(FLOW, compared=["disaggregated on 2"]),
    "flow, late chunks": acting([*FLOW, *LATE], compared=["disaggregated on 2"], iterations=2),
    "two views": acting(VIEWS, compared=["disaggregated on 2"], iterations=2),
    "two views, critic from images": acting([*VIEWS, *SEEN], compared=["disaggregated on 2"], iterations=2),
    "maniskill": acting(PICK, compared=["disaggregated on 2"], iterations=2),
    "two levels": Variant(two_levels, [], LEVEL_PLANS, [*LEVEL_PLANS][1:]),
    "two levels, carried over": Variant(two_levels, [CARRIED], LEVEL_PLANS, ["all apart, two shards"]),
    "two levels, instructions from images": Variant(two_levels, INSTRUCTED, LEVEL_PLANS, ["all apart, two shards"]),
    "sac": replaying(small, []),
    "rlpd": replaying(reach, RLPD),
    "dagger": replaying(reach, DAGGER),
    "recap": replaying(reach, RECAP),
    "math": math([], compared=["collocated on 2, switching", "pipelined on 2, by pairs", "unlike splits"]),
    "math, truncated masked": math(
        ["algorithm.mask_truncated=true", "generation.max_new_tokens=4"], compared=["collocated on 2"]
    ),
    "math, sequences": math(["algorithm.loss_level=sequence"], compared=["pipelined on 4, by blocks"]),
    "math, several steps": math(TWO_STEPS, compared=["hybrid on 2"]),
    "math, reference": math(["algorithm.kl_coef=0.1"], compared=["pipelined on 2, by blocks"]),
    "math, restricted sampling": math(
        ["generation.top_p=0.9", "generation.min_p=0.02", "algorithm.kl_coef=0.1", *TWO_STEPS],
        compared=["unlike splits"],
    ),
    "math, rloo": math(["algorithm=rloo", *TWO_STEPS], compared=["disaggregated on 2"]),
    "math, dapo": math(DAPO, compared=["disaggregated on 4"], iterations=3),
    "math, ppo": math(PPO, compared=["collocated on 2, switching"], iterations=3),
    "math, ppo, several steps, reference": math(
        [*PPO, *TWO_STEPS, "algorithm.kl_coef=0.1"], compared=["unlike splits"], iterations=3
    ),
    # receivers get changes; the first weights are sent whole, so that it takes three iterations
    "math, bfloat16": math(
        ["generation.precision=bfloat16", "algorithm.tis_cap=2.0"], compared=["disaggregated on 4"], iterations=3
    ),
    "math, episodes": math(
        ["tool._target_=experiments.examples.calculator.calculate", "warm_start.tool_share=0.5"],
        compared=["collocated on 2", "pipelined on 2, by blocks", "tool and engine apart"],
    ),
    "math, lora": math(["policy.lora.rank=4"], compared=["disaggregated on 2"]),
    "ppo, carried over, 1 behind": acting(
        [CARRIED, *STALE], compared=["learner apart", "collocated on 2"], iterations=4, staleness=1
    ),
    "ppo, carried over, 2 behind": acting([CARRIED, *STALE], compared=["hybrid on 2"], iterations=4, staleness=2),
    "grpo, 1 behind": acting(
        [*GRPO, *STALE], compared=["disaggregated on 3", "hybrid on 2"], iterations=4, staleness=1
    ),
    "math, dapo, several steps, 1 behind": math(
        [*DAPO, *TWO_STEPS, *STALE_MATH], compared=["hybrid on 2"], iterations=4, staleness=1
    ),
    "math, ppo, 2 behind": math([*PPO, *STALE_MATH], compared=["disaggregated on 4"], iterations=4, staleness=2),
}
BEHIND = [name for name, variant in VARIANTS.items() if variant.staleness]
# in every run of the tests, with all of math: uneven shares, switching, streaming, the learner on all devices, each
# algorithm's own paths
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
    *((name, "disaggregated on 2") for name in ("flow", "flow, late chunks", "two views")),
    ("two views, critic from images", "disaggregated on 2"),
    ("maniskill", "disaggregated on 2"),
    *(("two levels", plan) for plan in LEVEL_PLANS),
    ("two levels, carried over", "all apart, two shards"),
    ("sac", "collocated on 3, uneven"),
    ("sac", "disaggregated on 2"),
    ("sac", "unlike splits"),
    ("rlpd", "unlike splits"),
    ("dagger", "all apart"),
    ("recap", "unlike splits"),
    ("ppo, carried over, 1 behind", "learner apart"),
    ("ppo, carried over, 2 behind", "hybrid on 2"),
    ("grpo, 1 behind", "disaggregated on 3"),
}


def marks(name: str, plan: str) -> list[pytest.MarkDecorator]:
    is_chosen = (name, plan) in TELLING or "math" in name
    return [pytest.mark.sim] * (name == "maniskill") + [pytest.mark.slow] * (not is_chosen)


CASES = [
    pytest.param(name, plan, marks=marks(name, plan)) for name, variant in VARIANTS.items() for plan in variant.compared
]


# --------------------------------------------------------------------------------------------------------------- tests
Trained = tuple[tuple[str, ...], list[dict[str, float]]]  # digests of the weights, and metrics


def trained(name: str, plan: str, session: Session) -> Trained:
    variant = VARIANTS[name]
    config, (devices, tree) = variant.config(*variant.words), variant.plans[plan]
    ahead = [{**entry, "staleness": variant.staleness} for entry in tree]
    executor = executor_for(config, ahead, devices, session)
    metrics = iterate(config, executor, variant.iterations)
    for row in metrics:
        row.pop("charts/weights_sent_mb", None)  # grows with the number of receivers
    return digests(executor), metrics


@functools.cache
def by_one_worker(name: str) -> Trained:
    return trained(name, ONE, SerialSession())


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_every_plan_gives_the_weights_and_metrics_of_one_worker(name: str, plan: str) -> None:
    expected, metrics = by_one_worker(name)
    found, found_metrics = trained(name, plan, SerialSession())
    assert found_metrics == metrics
    assert found == expected


class Weighing(SerialSession):
    """Counts the bytes of exported weights that exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.exports = 0, 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        answers = super().submit(calls, collective)
        for (_, call, _), (message, *_) in zip(calls, answers, strict=True):
            if call.method == "export_weights":
                self._tensors += [weakref.ref(tensor) for tensor in message.tensors.values()]
                self.most = max(self.most, sum(tensor.nbytes for ref in self._tensors if (tensor := ref()) is not None))
                self.exports += 1
        return answers


@pytest.mark.parametrize(
    ("name", "plan"),
    [("math, bfloat16", "disaggregated on 4"), ("math", "disaggregated on 2")],
)
def test_weights_sent_in_parts_train_the_same_and_only_one_part_exists_at_a_time(name, plan, monkeypatch) -> None:
    whole, parts = Weighing(), Weighing()
    expected = trained(name, plan, whole)
    monkeypatch.setattr(executor, "PART_BYTES", whole.most // 8)
    assert trained(name, plan, parts) == expected
    assert parts.exports > 5 * whole.exports
    if "bfloat16" not in name:  # there the sender keeps what it has sent
        assert parts.most <= whole.most // 3


def test_adapters_are_sent_in_one_part_after_the_first_weights_were_sent_in_several(monkeypatch) -> None:
    variant, session = VARIANTS["math, lora"], Weighing()
    config = variant.config(*variant.words)
    made = executor_for(config, variant.plans["disaggregated on 2"][1], 2, session)
    monkeypatch.setattr(executor, "PART_BYTES", int(str(made.facts["actor"][0])) // 4)
    made.sync_weights()
    assert session.exports >= 4
    first = session.exports
    iterate(config, made, 2)
    assert session.exports == first + 2


@pytest.mark.parametrize("name", BEHIND)
def test_an_iteration_is_sampled_with_earlier_weights_than_are_trained(name: str) -> None:
    _, metrics = by_one_worker(name)
    assert [row["rollout/staleness"] for row in metrics] == [float(min(n, VARIANTS[name].staleness)) for n in range(4)]
    last = metrics[-1]
    if "math" in name:
        assert last["losses/mismatch_max"] > 1e-3
        assert last["losses/initial_log_ratio"] < 1e-4  # the clip is around the weights that were trained
    else:
        assert last["losses/initial_log_ratio"] > 1e-3


def test_late_chunks_have_the_log_probs_that_they_were_drawn_with() -> None:
    assert all(m["losses/initial_log_ratio"] <= 1e-4 for m in by_one_worker("flow, late chunks")[1])


def test_both_levels_learn() -> None:
    weights, metrics = by_one_worker("two levels")
    assert len(set(weights)) == 2
    assert all(m["high/losses/policy_steps"] > 0 and m["high/losses/initial_log_ratio"] <= 1e-5 for m in metrics)
    assert metrics[-1]["losses/policy_steps"] > 0


def test_groups_are_filled_up_by_further_rollouts() -> None:
    _, metrics = by_one_worker("grpo")
    assert max(m["rollout/rounds"] for m in metrics) > 1
    assert all(m["rollout/useful_groups"] == 4 for m in metrics)  # those beyond the four that a round has are left out


def test_dynamic_sampling_fills_the_batch_up_by_further_rounds() -> None:
    _, metrics = by_one_worker("math, dapo")
    assert max(m["rollout/rounds"] for m in metrics) > 2
    for m in metrics:
        full = m["rollout/rounds"] < 5  # those beyond the 8 that an iteration trains on are left out
        assert m["rollout/useful_groups"] == 8 if full else 0 < m["rollout/useful_groups"] <= 8
        assert m["rollout/completions"] == 32 * m["rollout/rounds"]


def test_demonstrations_and_labels_are_learned_from() -> None:
    _, rows = by_one_worker("rlpd")
    assert [row["rollout/demonstrations"] for row in rows] == [40, 80, 80, 80]
    assert [row["rollout/replay_size"] for row in rows] == [0, 0, 40, 80]
    assert [row["losses/updates"] for row in rows] == [0, 0, 0, 4]
    _, rows = by_one_worker("dagger")
    assert [row["losses/updates"] for row in rows] == [0, 4, 4, 4]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("ppo", "collocated on 2"),
        ("grpo", "disaggregated on 2"),
        ("sac", "disaggregated on 2"),
        ("two levels", "the policy with the learners"),
        ("math, ppo, several steps, reference", "hybrid on 2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ppo", "disaggregated on 2"),
                ("ppo, carried over, 1 behind", "learner apart"),
                ("sac", "collocated on 2"),
                ("rlpd", "disaggregated on 2"),
                ("dagger", "collocated on 2"),
                ("math, dapo", "disaggregated on 2"),
            )
        ),
    ],
)
def test_ray_workers_give_the_weights_of_one_process(ray_session, name: str, plan: str) -> None:
    assert trained(name, plan, ray_session) == by_one_worker(name)
