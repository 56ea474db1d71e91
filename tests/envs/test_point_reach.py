"""The toy: its expert, its images and its wall."""

from __future__ import annotations

import pytest
import torch

from envs.point_reach import PointSimulator, make_env, read_options
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError
from tests.observations import stacked

CONFIG = EnvConfig(task="PointReach-v0", num_envs=4, block_size=4, horizon=20, obs_size=16)


def test_the_expert_solves_every_episode() -> None:
    env = make_env(CONFIG, 64)
    env.reset(range(64))
    ends = [end for _ in range(4) for end in env.step_chunk(lambda _: env.expert_actions()).episodes]
    assert len(ends) == 64
    assert all(end.metrics["success_once"] == 1.0 for end in ends)


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
