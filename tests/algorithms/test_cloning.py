"""Behaviour cloning during RL: its part of a minibatch's gradient, where its examples come from, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recordings import point_episodes, write_recording
from runs import four, metric_rows, tiny, train
from torch import nn

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import CHUNKS, IMITATION_LOSS
from rlinf_embodied.algorithms.cloning import CloningTerm
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.embodied.starting_point import require_demonstrations
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import PROPRIO, Observation
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import AdamSettings
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import solo_context

CLONING = "algorithm.bc_coef=0.5"


class Line(ImitationPolicy):
    """Acts by one weight w: the imitation loss of a row is (w - action)^2."""

    def __init__(self) -> None:
        self.w = nn.Parameter(torch.tensor([2.0]))

    def encode_trainable(self, observation: Observation) -> dict:
        return {}

    def imitation_loss(self, features, actions, targets) -> torch.Tensor:
        return (self.w - actions[:, 0, 0]).square().sum()


def test_a_minibatch_steps_along_the_mean_of_the_policys_loss_and_the_mean_of_the_imitation_loss(monkeypatch) -> None:
    policy, reducer = Line(), Reducer(SoloGroup(), (0, 0, 0))
    algorithm = SimpleNamespace(bc_coef=0.5, bc_decay=0.9, bc_batch_size=8)
    training: Any = SimpleNamespace(
        policy=policy,
        algorithm=algorithm,
        reducer=reducer,
        context=solo_context(range(3)),
        seed=0,
        settings=PolicyConfig(),
    )
    term = CloningTerm(training)
    shown = lambda action: Demonstrations(  # noqa: E731
        Observation({PROPRIO: torch.zeros(5, 1)}, ("",) * 5, {}), torch.full((5, 1, 1), action), None
    )
    term.demonstrations = {0: shown(1.0), 2: shown(-1.0)}  # 2 and 3 of the 8 chunks; block 1 has none
    weights = torch.tensor([[1.0], [0.5], [2.0]])
    empty = torch.zeros(3, 1)
    block = TrainingBlock({}, {}, empty[..., None], empty > -1, empty, weights, None, None, None)
    learner = Learner([policy.w], AdamSettings(1e-3, (0.9, 0.999), 1e9, 1e-8, 0.0), (IMITATION_LOSS, CHUNKS), reducer)
    gradients = []
    monkeypatch.setattr(learner._optimizer, "step", lambda gradient, only: gradients.append(float(gradient)) or 0.0)

    def passes(rows: Mapping[int, torch.Tensor]) -> list[Pass]:
        weight = float(sum(weights[index].sum() for index in rows.values()))
        own = Pass(weight, lambda: LossSums(3.0 * weight * policy.w.sum(), torch.tensor(weight), torch.zeros(2)))
        return [own, *term.passes(rows, learner.statistics)]

    rows = [
        {b: torch.tensor([0, 1, 2]) for b in range(3)},
        {b: torch.tensor([1, 2][: b + 1]) for b in range(2)} | {2: torch.tensor([], dtype=torch.long)},
    ]
    steps = [learner.step(batch, passes) for batch in term.batches(iter(rows), dict.fromkeys(range(3), block), 2)]
    coef = 0.5 * 0.9**2
    # the policy's loss has a mean gradient of 3; d/dw of (w - a)^2 at w = 2 is 2 for a = 1, and 6 for a = -1
    assert gradients == pytest.approx([3.0 + coef * (2 * 2.0 + 3 * 6.0) / 5, 3.0 + coef * 2.0])
    assert [step.sums[CHUNKS] for step in steps] == [5, 2]  # a block without samples adds none
    assert steps[0].sums[IMITATION_LOSS] == pytest.approx(2 * 1.0 + 3 * 9.0)


def test_files_are_cloned_with_any_start(tmp_path) -> None:
    recording = write_recording(tmp_path / "demos.h5", point_episodes(tiny().env, 8))
    train(four(tmp_path / "run", CLONING, f"data={recording}", "warm_start.from_scratch=true"))
    losses = [row["losses/imitation_loss"] for row in metric_rows(tmp_path / "run")[1:]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.bc_coef=-1"], "algorithm.bc_coef is -1.0, but it must not be negative: use 0.0"),
        ([CLONING, "algorithm.bc_decay=2"], r"algorithm.bc_decay is 2.0, but it must lie in \[0, 1\]: use 1.0"),
        ([CLONING, "algorithm.bc_batch_size=0"], "algorithm.bc_batch_size is 0, .*at least 1: use 32"),
        (
            [CLONING, "algorithm.compile=true", "run.exact=exact"],
            "bc_coef is 0.5, .*neither compiled nor .*: use 0, or",
        ),
        ([CLONING, "algorithm.sharding=fsdp2", "run.exact=off"], "bc_coef is 0.5, .*nor sharded: use 0, or"),
        (["data=x.h5"], "data is 'x.h5', .*leave it out, .*or algorithm.bc_coef=0.1"),
        ([CLONING, "data=x.h5"], "data is 'x.h5', but there is nothing: give"),
    ],
)
def test_what_cannot_be_cloned_is_named_before_anything_starts(tmp_path, words, said) -> None:
    with pytest.raises(ConfigError, match=said):
        train(four(tmp_path, *words))


def test_demonstrations_need_a_source() -> None:
    peg = compose_train(["env=maniskill", "env.id=LiftPegUpright-v1", CLONING, "warm_start.from_scratch=true"])
    with pytest.raises(ConfigError, match=r"algorithm.bc_coef is 0.5, but .* no demonstrations are given: give data="):
        require_demonstrations(peg)
