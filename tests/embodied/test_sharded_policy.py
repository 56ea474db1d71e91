"""A policy whose weights are spread over the actor's workers trains as one whose are not, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from recordings import point_episodes, write_recording
from runs import SFT, clone, executor_for, exported_weights, iterate, tiny, trees

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner, fine_tuning_stage
from rlinf_embodied.embodied.sources import sources_of
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession

pytestmark = pytest.mark.usefixtures("no_group_stays")

SHARDED = ["algorithm.sharding=fsdp2", "run.exact=false"]
TOGETHER = trees("all", "all", "all")


def config_of(*overrides: str) -> TrainConfig:
    return tiny("algorithm.critic_warmup_iterations=0", "policy.options.num_layers=2", *overrides)


def assert_moved_alike(one: Executor, other: Executor, start: dict[str, torch.Tensor], limit: float) -> None:
    """The weights are apart by no more than a part of the way that they have come."""
    first, second = exported_weights(one), exported_weights(other)
    flat = lambda tensors: torch.cat([tensors[name].double().reshape(-1) for name in sorted(start)])  # noqa: E731
    way = (flat(second) - flat(start)).norm()
    assert way > 0
    assert (flat(first) - flat(second)).norm() < limit * way


@pytest.mark.ray
def test_two_workers_hold_halves_and_train_as_one(ray_session) -> None:
    """A plan of three workers: one acts in the simulator, two hold halves of the policy and rows of other blocks."""
    plain, config = config_of(), config_of(*SHARDED)
    start = clone(plain)
    executor = executor_for(config, trees([0], [0], [1, 2]), 3, ray_session, start)
    expected = executor_for(plain, TOGETHER, 1, SerialSession(), start)
    before = exported_weights(expected)
    metrics = iterate(config, executor, 2)
    iterate(config, expected, 2)
    assert all(row["losses/initial_log_ratio"] <= 1e-5 for row in metrics)
    (digest,) = set(executor.call("actor", "weights_digest", StepContext(0)))  # both views are equal
    assert digest
    assert_moved_alike(executor, expected, before, 1e-3)


class BesideABusierWorker(SoloGroup):
    """A group of one that reports the passes of a worker with two more of them, which adds nothing to the sums."""

    def exchange(self, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[list[torch.Tensor]]:
        ((weight_and_passes,),) = super().exchange(tensors, counts)
        return [[weight_and_passes + torch.tensor([0.0, 2.0])]]


def test_fine_tuning_joins_passes_for_which_it_has_no_rows_and_makes_the_same_steps(tmp_path: Path) -> None:
    recording = write_recording(tmp_path / "demos.h5", point_episodes(tiny().env, 4))
    own = ["algorithm.epochs=1", "algorithm.head_epochs=0", "run.num_iterations=1", "algorithm.held_out=0"]
    config = tiny(*SFT, *own, "warm_start.from_scratch=true", f"data={recording}", *SHARDED)
    start = str(clone(config))

    def trained(group: SoloGroup) -> tuple[object, str]:
        stage = FineTuningLearner(fine_tuning_stage(config, sources_of(config), start))
        stage.setup(solo_context(range(4)))
        for number in range(stage.open_sources(StepContext(0))):
            stage.collect(StepContext(number))
        stage.prepare(StepContext(0))
        stage._made.learners["whole_optimizer"]._group = group  # pyright: ignore[reportAttributeAccessIssue]
        before = stage.weights_digest(StepContext(0))
        metrics = stage.run(StepContext(0), {block: [] for block in range(4)})
        assert stage.weights_digest(StepContext(0)) != before
        return metrics.report, stage.weights_digest(StepContext(0))

    assert trained(BesideABusierWorker()) == trained(SoloGroup())


@pytest.mark.slow
def test_a_critic_on_features_has_weights_of_its_own_and_is_trained_whole() -> None:
    config = config_of(*SHARDED, "policy.critic=observation")
    metrics = iterate(config, executor_for(config, TOGETHER, 1, SerialSession(), clone(config)), 1)
    assert metrics[0]["losses/value_loss"] > 0
