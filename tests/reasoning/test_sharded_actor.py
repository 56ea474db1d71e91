"""An actor whose weights are spread over its workers trains as one whose are not, and nobody else notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from math_runs import TWO_STEPS, tiny_math
from runs import digest, executor_for, exported_weights, iterate

from rlinf_embodied.config import MathConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.resume import saved_progress

pytestmark = pytest.mark.usefixtures("no_group_stays")

SHARDED = ["algorithm.sharding=fsdp2", "run.exact=false"]


def config_of(*overrides: str) -> MathConfig:
    return tiny_math("policy.num_layers=2", "algorithm.tokens_per_microbatch=128", *overrides)


def assert_moved_alike(one: Executor, other: Executor, start: dict[str, torch.Tensor]) -> None:
    """The weights are apart by no more than a thousandth of the way that they have come.

    Adam makes whole steps of gradients that are no more than rounding, so single weights may be further apart.
    """
    first, second = exported_weights(one), exported_weights(other)
    moving = {name for name in start if ".lora_" in name} or set(start)  # of adapted models the adapters alone travel
    assert set(first) == set(second) == moving
    start = {name: start[name] for name in moving}
    flat = lambda tensors: torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])  # noqa: E731
    way = (flat(second) - flat(start)).norm()
    assert way > 0
    assert (flat(first) - flat(second)).norm() < 1e-3 * way


def test_a_single_worker_trains_as_an_unsharded_one_and_generates_with_its_view():
    options = ["algorithm.num_minibatches=2", "algorithm.epochs=2", "policy.lora.rank=4"]
    plain, sharded = config_of(*options), config_of(*options, *SHARDED)
    expected = executor_for(plain, plain.plan.variants, 1, SerialSession())
    executor = executor_for(sharded, sharded.plan.variants, 1, SerialSession())
    before = exported_weights(executor)
    metrics = iterate(sharded, executor, 2)
    assert metrics == [pytest.approx(row, rel=1e-3, abs=1e-4) for row in iterate(plain, expected, 2)]
    assert all(row["losses/mismatch_max"] < 1e-4 for row in metrics)  # generation had these very weights
    assert_moved_alike(executor, expected, before)


@pytest.mark.slow
def test_a_sharded_actor_continues_from_its_checkpoint_with_adapters(tmp_path):
    config = config_of("policy.lora.rank=4", *SHARDED)
    through = executor_for(config, config.plan.variants, 1, SerialSession())
    progress = Progress(before={})
    iterate(config, through, 2, progress)
    ReasoningJob(config).save(through, tmp_path, progress)
    last = iterate(config, through, 1, progress)
    checkpoint = tmp_path / "step_000002"
    resumed = executor_for(config, config.plan.variants, 1, SerialSession(), str(checkpoint))
    ReasoningJob(config).load(resumed, checkpoint)
    assert iterate(config, resumed, 1, saved_progress(checkpoint)) == last
    assert digest(resumed) == digest(through)


@pytest.mark.slow
@pytest.mark.ray
def test_two_workers_send_whole_weights_and_resume_on_one(ray_session, tmp_path: Path):
    """A plan of three workers: one generates, two hold halves of the actor; each of these has rows of other blocks."""
    config, plain = config_of(*SHARDED), config_of()
    plan = [{"items": ["prompts on 2", "generation on 2", "reward on 0-1", "actor on 0-1"]}]
    executor = executor_for(config, plan, 3, ray_session)
    progress = Progress(before={})
    metrics = iterate(config, executor, 2, progress)
    assert all(row["losses/mismatch_max"] < 1e-4 for row in metrics)  # what was sent are the weights that are trained
    digest(executor)  # all views are equal
    ReasoningJob(config).save(executor, tmp_path, progress)
    expected = executor_for(plain, plain.plan.variants, 1, SerialSession())
    going_on = Progress()
    before = exported_weights(expected)
    iterate(plain, expected, 2, going_on)
    assert_moved_alike(executor, expected, before)
    checkpoint = tmp_path / "step_000002"
    resumed = executor_for(config, config.plan.variants, 1, SerialSession(), str(checkpoint))
    ReasoningJob(config).load(resumed, checkpoint)
    iterate(config, resumed, 1, saved_progress(checkpoint))
    iterate(plain, expected, 1, going_on)
    assert_moved_alike(resumed, expected, before)


def test_exact_runs_refuse_more_than_one_worker():
    config = config_of("algorithm.sharding=fsdp2")
    with pytest.raises(ConfigError, match=r"sharding is .fsdp2., but run.exact needs.*2 sharded workers.*exact=false"):
        executor_for(config, config.plan.variants, 2, SerialSession())
    executor_for(config, config.plan.variants, 1, SerialSession())


@pytest.mark.parametrize("variant", [TWO_STEPS, SHARDED], ids=["two steps", "in slices"])
def test_an_iteration_corrects_for_float32_generation_and_moves_float32_weights(variant: list[str]) -> None:
    config = tiny_math("algorithm.precision=bfloat16", *variant)
    executor = executor_for(config, config.plan.variants, 1, SerialSession())
    row = ReasoningJob(config).run_iteration(executor, Progress())[1]
    assert 1e-4 < row["losses/mismatch_max"] < 0.5  # generation's weights are the same, but nothing was rounded there
    assert row["losses/initial_log_ratio"] < (0.3 if variant == TWO_STEPS else 1e-6)  # other batches; the pass itself
    assert row["losses/grad_norm"] > 0
    assert {value.dtype for value in exported_weights(executor).values()} == {torch.float32}
