"""Envs at a fixed control rate, by a clock that only sleeping and computing move."""

from __future__ import annotations

import pytest
import torch
from runs import tiny
from torch import Tensor

from envs import point_reach
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied import env_stage
from rlinf_embodied.embodied.env_stage import paced
from rlinf_embodied.interfaces.envs import VectorEnv

ROWS, SEEDS = 4, [1, 2, 3, 4]


class Clock:
    """Stands for the module `time`; seconds in sixty-fourths are exact."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(env_stage, "time", made)
    return made


def computing(config: EnvConfig, clock: Clock, step_s: float, images_s: float, begins: list[float]) -> VectorEnv:
    """Returns the toy, whose steps and images take some of the clock's time."""
    env = point_reach.make_env(config, ROWS)
    step, images = env.simulator.step, env.simulator.images

    def slow_step(actions: Tensor, rows: object) -> None:
        begins.append(clock.now_s)
        clock.now_s += step_s
        step(actions, rows)  # pyright: ignore[reportArgumentType]

    def slow_images(rows: object) -> Tensor:
        clock.now_s += images_s
        return images(rows)  # pyright: ignore[reportArgumentType]

    env.simulator.step, env.simulator.images = slow_step, slow_images  # pyright: ignore[reportAttributeAccessIssue]
    return env


def actions_for(config: EnvConfig) -> Tensor:
    return torch.full((ROWS, config.chunk, 2), 0.1)


def test_steps_begin_a_period_apart_and_a_chunk_returns_when_its_last_step_is_over(clock: Clock) -> None:
    config, begins = tiny().env, []
    env = computing(config, clock, step_s=1 / 64, images_s=2 / 64, begins=begins)
    env.reset(SEEDS)
    start_s = clock.now_s
    paced(env, actions_for(config), None, 16)
    assert begins == [start_s + k / 16 for k in range(config.chunk)]
    assert clock.now_s == start_s + config.chunk / 16
    # the env's own computing is part of the period: 3/64 s are left of a step, 1/64 s of the last one, with images
    assert clock.slept_s == [3 / 64] * (config.chunk - 1) + [1 / 64]
