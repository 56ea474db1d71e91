"""PPO's curves beside its peers': what is trained, what is kept, and that theirs have as many env steps."""

from __future__ import annotations

import pytest

from experiments.bench import ppo_curves
from rlinf_embodied.compose import compose_train

PENDULUM = ppo_curves.Case("Pendulum-v1", ("env=gymnasium",), 1, ppo_curves.STEPS, ("sb3",))


@pytest.mark.parametrize("name", ppo_curves.CASES)
def test_a_case_has_the_env_steps_and_minibatches_that_it_says(name: str) -> None:
    case = ppo_curves.CASES[name]
    config = compose_train(list(case.words))
    steps = config.env.num_envs * config.env.chunks_per_rollout * config.env.chunk
    assert (config.env.task, steps) == (case.task, case.steps)
    size = ppo_curves.PICK["batch_size"] if case.task == "PickCube-v1" else ppo_curves.MINIBATCH
    assert steps // config.algorithm.num_minibatches == size
    assert config.env.horizon == (1000 if name == "halfcheetah" else 50)


@pytest.mark.slow
def test_the_peer_trains_for_the_steps_that_it_is_given() -> None:
    curve = ppo_curves.Peer().learn("sb3", PENDULUM, 3, 2 * ppo_curves.STEPS, 2, 2)
    assert curve.steps == [0, ppo_curves.STEPS, 2 * ppo_curves.STEPS]
    assert len(curve.returns) == 3
    assert all(found < 0 for found in curve.returns)
    assert curve.success == []
