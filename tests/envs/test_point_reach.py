"""The toy fails when told to, in the way it was told."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from envs.point_reach import PointSimulator, make_env, read_options
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError
from tests.observations import stacked

CONFIG = EnvConfig(task="PointReach-v0", num_envs=4, block_size=4, horizon=20, obs_size=16)
STILL = torch.zeros(4, 5, 2)


def test_the_expert_solves_every_episode() -> None:
    env = make_env(CONFIG, 64)
    env.reset(range(64))
    ends = [end for _ in range(4) for end in env.step_chunk(lambda _: env.expert_actions()).episodes]
    assert len(ends) == 64
    assert all(end.metrics["success_once"] == 1.0 for end in ends)


def test_a_crash_comes_in_its_step_and_once_only_if_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = replace(CONFIG, options={"crash_at_step": 7, "once": 3})
    env = make_env(config, 4)
    env.reset(range(4))
    env.step_chunk(STILL)
    with pytest.raises(SimulatorError, match="crash_at_step is 7"):
        env.step_chunk(STILL)
    again = make_env(config, 4)
    again.reset(range(4))
    assert again.step_chunk(STILL).valid.all()
    assert again.step_chunk(STILL).valid.all()


def test_an_exit_ends_the_process() -> None:
    code = (
        "import torch; from rlinf_embodied.config import EnvConfig; from envs.point_reach import make_env\n"
        "env = make_env(EnvConfig(task='PointReach-v0', options={'exit_at_step': 2}), 1)\n"
        "env.reset([0]); env.step_chunk(torch.zeros(1, 5, 2))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 13


def test_a_slow_env_takes_its_time() -> None:
    env = make_env(replace(CONFIG, options={"slow_s": 0.02}), 4)
    env.reset(range(4))
    start = time.perf_counter()
    env.step_chunk(STILL)
    assert time.perf_counter() - start >= 5 * 0.02


def test_an_unknown_option_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean crash_at_step"):
        make_env(replace(CONFIG, options={"crash_at_stepp": 1}), 1)


def test_the_image_shows_point_and_goal() -> None:
    env = make_env(CONFIG, 1)
    seen = env.reset([3])
    image = stacked(seen)[0, 0].float()
    red = (image[..., 0] > 200).nonzero().float().mean(0)  # row, column
    x, y = seen.proprio[0, :2].tolist()
    assert red[1] == pytest.approx((x + 1) / 2 * 16 - 0.5, abs=1)
    assert red[0] == pytest.approx((1 - y) / 2 * 16 - 0.5, abs=1)
    assert (image[..., 1] > 150).any()


def walled(*points: tuple[float, float]) -> PointSimulator:
    simulator = PointSimulator(EnvConfig(options={"gap": 0.5}), len(points), torch.device("cpu"))
    simulator._point = torch.tensor(points)
    return simulator


def test_a_wall_stops_who_does_not_come_through_its_gap() -> None:
    simulator = walled((-0.1, 0.0), (-0.1, 0.5), (0.1, 0.9), (-0.3, 0.0))
    simulator.step(torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]]), range(4))
    expected = torch.tensor([[-0.1, 0.0], [0.05, 0.5], [0.1, 0.9], [-0.15, 0.15]])
    torch.testing.assert_close(simulator._point, expected)


def test_episodes_with_a_wall_begin_left_of_it_and_their_expert_comes_through() -> None:
    simulator = walled(*[(0.0, 0.0)] * 8)
    simulator.reset(range(8), range(8))
    assert (simulator._point[:, 0] < 0).all()
    assert (simulator._goal[:, 0] > 0).all()
    for _ in range(60):
        simulator.step(simulator.expert(), range(8))
    assert simulator.measure(torch.zeros(8, 2)).success.all()


def test_a_gap_lies_in_the_wall() -> None:
    with pytest.raises(ConfigError, match=r"env.options.gap is 1.5, but the wall goes from -1 to 1: use 0.7"):
        read_options(EnvConfig(options={"gap": 1.5}))
