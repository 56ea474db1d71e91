"""Gymnasium's envs behind the contract of tests/envs/test_env_contract.py: spaces, ends, success, images, errors."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envs.episodes import EpisodeEnv
from envs.foreign.env import resized
from envs.foreign.worker import offscreen_gl
from envs.gym.env import make_env
from envs.gym.spaces import ActionCode, ObservationCode
from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.errors import ConfigError, SimulatorError
from tests.observations import stacked

CHEETAH = compose_train(["env=gymnasium", "policy=state", "env.id=HalfCheetah-v5"]).env
WALK = replace(CHEETAH, task="gym_envs:Walk-v0", horizon=10, carry_over=False, chunks_per_rollout=10)


def walk(rows: int = 2, options: dict | None = None, **changes: object) -> EpisodeEnv:
    return make_env(replace(WALK, options={"make": options or {}}, **changes), rows)


def row_of(env: EpisodeEnv, row: int) -> gymnasium.Env:
    return env.simulator._links[0]._rows._scenes[row][1].env.unwrapped


def forward(rows: int = 2) -> torch.Tensor:
    return torch.zeros(rows, 1, 1)  # the middle of [-2, 4]: 1 step


def test_rows_are_bit_for_bit_gymnasiums_own_episodes() -> None:
    env, actions = make_env(CHEETAH, 3), torch.rand(20, 3, 1, 6) * 2 - 1
    env.reset([5, 6, 7])
    for row, seed in enumerate((5, 6, 7)):
        alone = gymnasium.make("HalfCheetah-v5")
        alone.reset(seed=seed)
        theirs = [alone.step(action.numpy()) for action in actions[:, row, 0]]
        env.reset([5, 6, 7])
        for action, (seen, reward, *_) in zip(actions, theirs, strict=True):
            result = env.step_chunk(action)
            assert torch.equal(result.observation.proprio[row], torch.as_tensor(seen, dtype=torch.float32))
            assert float(result.rewards[row, 0]) == np.float32(reward)


def test_actions_may_be_in_the_units_of_the_space() -> None:
    box = spaces.Box(np.array([-90.0, 0.0]), np.array([90.0, 100.0]), dtype=np.float64)
    code = ActionCode.of(box, "arm", is_physical=True)
    assert code.decode(np.array([[45.0, 120.0], [-200.0, 7.0]])).tolist() == [[45.0, 100.0], [-90.0, 7.0]]
    walked = [make_env(replace(WALK, options={"physical_actions": physical}), 1) for physical in (True, False)]
    for env in walked:
        env.reset([1])
    steps = [env.step_chunk(torch.full((1, 1, 1), value)) for env, value in zip(walked, (1.0, 0.0), strict=True)]
    assert torch.equal(steps[0].observation.proprio, steps[1].observation.proprio)
    with pytest.raises(ConfigError, match=r"env.options.physical_actions is True, .* choices: leave it out"):
        ActionCode.of(spaces.Discrete(3), "arm", is_physical=True)


def test_an_expert_of_the_env_acts_in_its_units_or_in_those_of_policies() -> None:
    box = spaces.Box(np.array([-90.0, 0.0]), np.array([90.0, 100.0]), dtype=np.float64)
    assert ActionCode.of(box, "arm", is_physical=True).encode(np.array([45.0, 100.0])).tolist() == [45.0, 100.0]
    assert ActionCode.of(box, "arm").encode(np.array([45.0, 120.0])).tolist() == [0.5, 1.0]
    for task, python in ((WALK.task, {}), (f"tests.{WALK.task}", {"python": sys.executable})):
        env = make_env(replace(WALK, task=task, options={"physical_actions": True, **python}), 2)
        assert torch.equal(env.expert_actions(), torch.zeros(2, 1))
        seen = env.reset([1, 2])
        assert torch.equal(env.expert_actions(), seen.proprio)
        env.close()


def test_the_camera_may_have_any_name_and_images_need_not_be_square() -> None:
    config = replace(WALK, task="gym_envs:Picture-v0", cameras=["front"], options={"image_size": [3, 9]})
    images = make_env(config, 1).reset([1]).images
    assert {name: tuple(image.shape) for name, image in images.items()} == {"front": (1, 3, 9, 3)}
    with pytest.raises(ConfigError, match=r"env.options.image_size is \[3\], but it is \[<height>, <width>\]"):
        make_env(replace(config, options={"image_size": [3]}), 1)


@pytest.mark.parametrize("hold_steps", [0, 1])
def test_the_envs_own_end_is_terminated_even_where_success_ends_nothing(hold_steps: int) -> None:
    env = walk(hold_steps=hold_steps)
    env.reset([1, 2])
    first, second = env.step_chunk(forward()), env.step_chunk(forward())
    ended = first.terminated | second.terminated
    assert ended.all()
    assert not (first.truncated | second.truncated).any()
    assert not env.step_chunk(forward()).valid.any()  # rows that ended are frozen, not stepped on


def test_the_envs_own_cut_is_truncated() -> None:
    env = walk(options={"ends": "truncated"})
    env.reset([1, 2])
    results = [env.step_chunk(forward()) for _ in range(2)]
    assert torch.stack([r.truncated for r in results]).any(0).all()
    assert not any(r.terminated.any() for r in results)
    assert all(float(r.final_observation.proprio.min()) > 1 for r in results if r.final_rows)  # before any reset


def test_the_horizon_takes_the_place_of_gymnasiums_time_limit() -> None:
    env = walk(options={"low": -4.0})  # in the middle of [-4, 4] nothing moves; Walk-v0 is registered with 3 steps
    env.reset([1, 2])
    cut = [env.step_chunk(forward()).truncated[:, 0].tolist() for _ in range(10)]
    assert cut == [[False, False]] * 9 + [[True, True]]


def test_success_is_what_info_tells_and_without_it_there_is_none() -> None:
    reported, silent = walk(options={"ends": "success"}), walk()
    assert reported.spec.has_success
    assert not silent.spec.has_success
    ends = {}
    for name, env in (("reported", reported), ("silent", silent)):
        env.reset([1, 2])
        ends[name] = [end for _ in range(2) for end in env.step_chunk(forward()).episodes]
    assert [end.metrics["success_once"] for end in ends["reported"]] == [1.0, 1.0]
    assert all("success_once" not in end.metrics and "return" in end.metrics for end in ends["silent"])


def test_pixels_that_are_not_what_the_space_says_are_refused() -> None:
    floats = {"task": "gym_envs:Picture-v0", "cameras": ["rgb_array"], "options": {"make": {"dtype": "float32"}}}
    with pytest.raises(SimulatorError, match=r"an image is float32.*but policies see uint8"):
        make_env(replace(WALK, **floats), 2).reset([0, 1])


def test_actions_are_scaled_to_the_bounds_and_clipped() -> None:
    env = walk(rows=1)
    env.reset([0])
    for action in (-1.0, 0.5, 3.0):
        env.step_chunk(torch.full((1, 1, 1), action))
        if env.running()[0] is None:
            env.reset([0])
    received = [float(a[0]) for a in row_of(env, 0).received[1:]]  # the first looks for success
    assert received == [-2.0, 2.5, 4.0]


def test_spaces_become_vectors_or_are_refused_by_name() -> None:
    code = ActionCode.of(spaces.Discrete(3, start=5), "x")
    assert (code.dim, code.categorical) == (3, True)
    assert code.decode(np.eye(3) * 2 - 1) == [5, 6, 7]
    with pytest.raises(SimulatorError, match=r"env\.task is 'gym_envs:Walk-v0', whose actions .*put .*around"):
        walk(options={"space": "unbounded"})
    seen = ObservationCode.of(spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2, 2))}), "x")
    parts = {"a": 1, "b": np.full((2, 2), 0.5, np.float32)}
    assert (seen.dim, seen.state(parts).tolist()) == (7, [0, 1, 0, 0.5, 0.5, 0.5, 0.5])
    with pytest.raises(SimulatorError, match="fixed number of entries"):
        ObservationCode.of(spaces.Sequence(spaces.Discrete(2)), "x")


def picture(**changes: object) -> EpisodeEnv:
    given = {"task": "gym_envs:Picture-v0", "cameras": ["rgb_array"], "obs_size": 3} | changes
    return make_env(replace(WALK, **given), 2, render_final=True)


def test_images_are_scaled_by_the_mean_of_an_area() -> None:
    chequered = np.indices((4, 4)).sum(0) % 2 * 200
    assert resized(chequered.astype(np.uint8), (2, 2)).unique().tolist() == [100]
    with pytest.raises(SimulatorError, match="1 or 3 channels"):
        resized(np.zeros((4, 4, 2), np.uint8), (2, 2))


def test_films_are_what_render_gives_and_missing_ones_are_left_out() -> None:
    env = picture()
    env.reset([0, 1])
    env.record([1], 12)
    env.step_chunk(torch.zeros(2, 1, 3))
    frames = env.take_frames()
    assert {row: [tuple(f.shape) for f in images] for row, images in frames.items()} == {1: [(12, 12, 3)]}
    blind = walk()
    blind.reset([0, 1])
    blind.record([0], 12)
    blind.step_chunk(forward())
    assert blind.take_frames() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "NoSuch-v0"}, "env.task is 'NoSuch-v0', which gymnasium.make refuses"),
        ({"cameras": ["a", "b"]}, r"env.cameras is \['a', 'b'\], but a Gymnasium env has one"),
        ({"task": "gym_envs:Picture-v0"}, r"observes only an image: set env.cameras=\[rgb_array\]"),
        ({"cameras": ["rgb_array"]}, "neither an image in its observation nor the render mode"),
        ({"options": {"thread": 2}}, "env.options.thread is 2"),
        ({"options": {"make": {"max_episode_steps": 5}}}, "env.options.make"),
        ({"carry_over": True}, "env.options.history_free=true"),  # known of Gymnasium's own envs only
    ],
)
def test_what_cannot_be_is_refused_with_the_key_to_change(changes: dict, message: str) -> None:
    with pytest.raises((ConfigError, SimulatorError), match=message):
        make_env(replace(WALK, **changes), 2)


def test_numbers_that_are_not_finite_name_their_rows() -> None:
    env = walk(options={"ends": "nan"})
    env.reset([0, 1])
    env.step_chunk(torch.tensor([-1 / 3, -1 / 3])[:, None, None])
    with pytest.raises(SimulatorError, match=r"proprio that is NaN or infinite in rows 1:"):
        env.step_chunk(torch.tensor([-1 / 3, 1.0])[:, None, None])


def test_a_time_limit_is_gymnasiums_own_and_presets_go_together() -> None:
    for task, steps in (("Pusher-v5", 100), ("Hopper-v5", 1000), ("gym_envs:Picture-v0", 1000), ("NoSuch-v0", 1000)):
        config = compose_train(["env=gymnasium", f"env.id={task}", "policy=state", "algorithm=ppo_dense"])
        assert config.env.horizon == steps
        assert config.env.block_size == config.env.num_envs == 8  # ppo_dense asks for blocks of 32
    assert compose_train(["env=gymnasium", "policy=state", "env.horizon=7"]).env.horizon == 7


def test_mujoco_draws_without_a_display_and_a_missing_renderer_is_named(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.delenv("DISPLAY", raising=False)
    walk()
    assert os.environ["MUJOCO_GL"] == offscreen_gl()

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    monkeypatch.setattr(gymnasium, "make", broken)
    with pytest.raises(SimulatorError, match=r"MUJOCO_GL=.* finds no library: apt-get install libosmesa6 libegl1"):
        walk()


# --------------------------------------------------------------------------------------------------- behind a pipe
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
        ({"python": "nothing"}, "runs in a separate virtual environment.*experiments.setup.foreign env=nothing"),
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
