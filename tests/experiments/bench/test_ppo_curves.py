"""PPO's curves beside its peers': what is trained, what is kept, and that theirs have as many env steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from experiments.bench import ppo_curves
from experiments.bench.control.curves import Curve, draw
from experiments.bench.harness import Run
from rlinf_embodied.compose import compose_train
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_target
from tests.observations import stacked

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


@pytest.mark.sim
@pytest.mark.parametrize("name", ["pick", "images"])
def test_the_peer_on_our_rows_sees_what_ours_sees_with_as_many_weights(name: str) -> None:
    case = ppo_curves.CASES[name]
    config = compose_train(list(case.words))
    ours = make_env(config.env, 10, "cpu")
    train, held = ppo_curves.Peer()._envs("sb3 on ours", case, 1)
    try:
        shown = ours.reset(list(range(10)))
        held.seed(0)
        seen = held.reset()
        seen = seen if isinstance(seen, dict) else {"proprio": seen}
        assert train.observation_space == held.observation_space
        spaces = getattr(train.observation_space, "spaces", {"proprio": train.observation_space})
        assert spaces["proprio"].shape == shown.proprio.shape[1:]
        assert torch.equal(torch.from_numpy(seen["proprio"]), shown.proprio)
        assert ("image" in seen) == bool(shown.images)
        if shown.images:
            assert torch.equal(torch.from_numpy(seen["image"]), stacked(shown)[:, 0])
        policy = load_target(config.policy._target_)(config.policy, ours.spec, 0)
        peer = ppo_curves.Peer().model("sb3 on ours", case, 1, train)
        assert count(policy.module) == count(peer.policy)
    finally:
        for env in (ours, train, held):
            env.close()


def count(module: torch.nn.Module) -> int:
    """Returns how many weights are trained."""
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


def test_the_peer_trains_for_the_steps_that_it_is_given() -> None:
    curve = ppo_curves.Peer().learn("sb3", PENDULUM, 3, 2 * ppo_curves.STEPS, 2, 2)
    assert curve.steps == [0, ppo_curves.STEPS, 2 * ppo_curves.STEPS]
    assert len(curve.returns) == 3
    assert all(found < 0 for found in curve.returns)
    assert curve.success == []


def test_what_was_trained_is_not_trained_again(monkeypatch, tmp_path) -> None:
    trained = []

    def train(words, seed, folder, points):
        folder.mkdir(parents=True)
        trained.append((seed, words[-3]))
        return Curve(seed, [0, 10], [0.0, float(seed)], [], 1.0)

    monkeypatch.setattr(ppo_curves, "trained", train)
    monkeypatch.setattr(ppo_curves, "CASES", {"pendulum": replace(PENDULUM, arms=())})
    own = ppo_curves.Options(seeds="4,5", folder=str(tmp_path / "runs"))
    first = ppo_curves.measure(Run(own, [], {}))
    assert trained == [(seed, "run.num_iterations=1") for seed in (4, 5)]
    again = ppo_curves.measure(Run(own, [], {}))
    assert (again.text, len(trained)) == (first.text, 2)
    assert [curve["returns"][-1] for curve in again.content["curves"]["pendulum"]["ours"]] == [4.0, 5.0]
    with pytest.raises(ConfigError, match="holds a training with other settings"):
        ppo_curves.measure(Run(replace(own, seeds="4", iterations=3), [], {}))
    json.dumps(again.content)


def test_every_arm_is_drawn(monkeypatch, tmp_path) -> None:
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: shown.extend(figure.axes))
    arms = {f"arm {k}": [Curve(0, [0, 1], [0.0, float(k)], [], 1.0)] for k in range(7)}
    draw({"pick": arms}, {"pick": "env steps"}, tmp_path / "drawn.png")
    assert [text.get_text() for text in shown[0].get_legend().get_texts()] == [
        f"{arm}, mean of 1 seeds" for arm in arms
    ]
