"""A Gymnasium env behind a pipe is the env itself: here with the Python of the tests in the place of another one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envs.gym.env import make_env
from envs.gym.spaces import ObservationCode
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.errors import ConfigError, SimulatorError
from tests.observations import stacked

HANDOVER = Path(__file__).with_name("handover.yaml")
CART = replace(
    compose_evaluate(["env=gymnasium", "env.id=CartPole-v1", "policy=random"]).env,
    num_envs=3,
    block_size=3,
    horizon=20,
    carry_over=False,
)


def test_rows_behind_a_pipe_are_those_of_this_process_bit_for_bit() -> None:
    here = make_env(CART, 3)
    there = make_env(replace(CART, options={"python": sys.executable, "processes": 2}), 3)
    assert replace(there.spec) == here.spec
    assert torch.equal(here.reset([1, 2, 3]).proprio, there.reset([1, 2, 3]).proprio)
    for actions in torch.rand(15, 3, 1, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1:
        ours, theirs = here.step_chunk(actions, [7, 8, 9]), there.step_chunk(actions, [7, 8, 9])
        assert torch.equal(ours.observation.proprio, theirs.observation.proprio)
        assert torch.equal(ours.rewards, theirs.rewards)
        assert torch.equal(ours.terminated, theirs.terminated)
    there.close()


def test_an_episode_behind_a_pipe_is_the_same_after_and_beside_others() -> None:
    """Of an env whose rows share a variable of their process, and whose starts only the picture tells apart."""
    section = compose_evaluate([f"env={HANDOVER}", "policy=random"]).env
    made = replace(section, task=f"tests.{section.task}")  # the other process has the repository alone on its path
    pipe = {"python": sys.executable, "history_free": True}
    actions = torch.rand(2, 3, section.chunk, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    env = make_env(replace(made, options=pipe), 3)
    answers = []
    for seeds in ([5, 6, 7], [90, 91, 92], [5, 6, 7]):
        begun = env.reset(seeds)
        answers.append((begun, *(env.step_chunk(action).observation for action in actions)))
    running = env.running()
    env.close()
    other = make_env(replace(made, options={**pipe, "processes": 2}), 3)
    other.reset([30, 31, 32])
    answers[1] = (*answers[0][:2], other.restore(running))
    other.close()
    for first, *others in zip(*answers, strict=True):
        assert all(torch.equal(stacked(first), stacked(again)) for again in others)
        assert all(torch.equal(first.proprio, again.proprio) for again in others)
    assert len({image.numpy().tobytes() for image in stacked(answers[0][0])}) == 3
    assert len(answers[0][0].proprio.unique(dim=0)) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"python": ".venv-nothing/bin/python"}, "env.options.python is '.venv-nothing/bin/python'.*python -m venv"),
        ({"python": "nothing"}, "runs in a separate virtual environment.*experiments.setup.foreign nothing"),
        ({"python": "x", "timeout_s": 0}, "env.options.timeout_s is 0"),
    ],
)
def test_options_that_cannot_be_name_their_path(options: dict, words: str) -> None:
    with pytest.raises((ConfigError, SimulatorError), match=words):
        make_env(replace(CART, options=options), 1)


def test_an_image_within_dicts_is_seen_and_the_rest_is_the_state() -> None:
    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    space = spaces.Dict({"pixels": spaces.Dict({"top": image}), "agent_pos": spaces.Box(-1, 1, (2,))})
    code = ObservationCode.of(space, "x")
    seen = {"pixels": {"top": np.ones((4, 4, 3), np.uint8)}, "agent_pos": np.array([0.5, -0.5], np.float32)}
    assert code.is_image
    assert code.state(seen).tolist() == [0.5, -0.5]
    assert code.image(seen).shape == (4, 4, 3)
    assert ObservationCode.of(space["pixels"], "x").dim == 0
    with pytest.raises(SimulatorError, match=r"several images \(a, b\)"):
        ObservationCode.of(spaces.Dict({"a": image, "b": image}), "x")
