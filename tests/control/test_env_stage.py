"""Transitions are those that the env itself would tell, whoever holds the rows and however episodes end."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from control_runs import reach, small

from rlinf_embodied.algorithms.sac import SACConfig
from rlinf_embodied.algorithms.transitions import EXPERT_ACTION, STATE, observation_of, seen_columns
from rlinf_embodied.embodied.env_stage import EnvStage, EnvStageConfig
from rlinf_embodied.randomness import reset_seed, uniform
from rlinf_embodied.runtime.host import StepContext, solo_context
from tests.observations import stacked

STEPS, ROWS = 7, 4


def rolled_out(stage: EnvStage, blocks: tuple[int, ...], iterations: int = 2, dims: int = 1) -> list[dict]:
    """Returns the transitions of a block in each iteration, under actions that are keyed by row and step."""
    found = []
    for iteration in range(iterations):
        when = StepContext(iteration)
        stage.open(when, blocks)
        for step in range(STEPS):
            stage.step(when, {block: chosen(block, iteration, step, dims) for block in blocks})
        found.append(stage.close(when, dict.fromkeys(blocks)).blocks)
    return found


def chosen(block: int, iteration: int, step: int, dims: int = 1) -> torch.Tensor:
    ids = np.arange(block * 2, block * 2 + 2)
    return torch.from_numpy(uniform(0, "test", ids, iteration, step, shape=(1, dims))) * 2 - 1


def stage_of(*overrides: str) -> tuple[EnvStage, tuple[int, ...]]:
    config = small("env.num_envs=4", f"env.chunks_per_rollout={STEPS}", *overrides)
    stage = EnvStage(EnvStageConfig(config.env, 3, transitions=SACConfig.columns))
    blocks = tuple(range(config.env.num_blocks))
    stage.setup(solo_context(blocks))
    return stage, blocks


def by_hand(task: str, row: int, horizon: int, low: float, high: float, carry_over: bool) -> list[list[tuple]]:
    """The same row, stepped by Gymnasium alone."""
    env, told, state, steps = gymnasium.make(task).unwrapped, [], None, 0
    for iteration in range(2):
        episode, mine = 0, []
        if state is None or not carry_over:
            (state, _), steps = env.reset(seed=int(reset_seed(3, row, iteration, 0, episode))), 0
        for step in range(STEPS):
            action = float(chosen(row // 2, iteration, step)[row % 2, 0, 0])
            after, reward, terminated, *_ = env.step(np.array([low + (action + 1) / 2 * (high - low)], np.float32))
            steps += 1
            mine.append((state, action, reward, after, terminated))
            state = after
            if terminated or steps == horizon:
                episode += 1
                (state, _), steps = env.reset(seed=int(reset_seed(3, row, iteration, 0, episode))), 0
        told.append(mine)
    return told


@pytest.mark.parametrize(
    ("task", "bounds", "carry_over"), [("Pendulum-v1", (-2.0, 2.0), True), ("gym_envs:Walk-v0", (-2.0, 4.0), False)]
)
def test_transitions_are_those_of_gymnasium(task, bounds, carry_over) -> None:
    words = [f"env.id={task}", "env.horizon=5", f"env.carry_over={str(carry_over).lower()}"]
    found = rolled_out(*stage_of(*words))
    ends = 0
    for row in range(ROWS):
        for iteration, expected in enumerate(by_hand(task, row, 5, *bounds, carry_over)):
            columns = {name: column[row % 2 :: 2] for name, column in found[iteration][row // 2].items()}
            for name, values in zip(SACConfig.columns, zip(*expected, strict=True), strict=True):
                wanted = torch.tensor(np.array(values), dtype=torch.float32).reshape(columns[name].shape)
                torch.testing.assert_close(columns[name], wanted, rtol=1e-5, atol=1e-6)
            ends += int(columns["terminated"].sum())
    assert (ends > 0) == (task != "Pendulum-v1")  # which is only ever cut off


def test_the_expert_acts_first_and_says_later_what_it_would_do() -> None:
    config = reach("env.num_envs=4", f"env.chunks_per_rollout={STEPS}").env
    columns = ("state", "action", "expert_action")
    stage = EnvStage(EnvStageConfig(config, 3, transitions=columns, expert_iterations=1))
    stage.setup(solo_context((0, 1)))
    first, later = rolled_out(stage, (0, 1), dims=2)
    for block in (0, 1):
        assert torch.equal(first[block]["action"], first[block]["expert_action"])
        assert not torch.equal(later[block]["action"], later[block]["expert_action"])
        way = later[block]["state"][:, 2:] - later[block]["state"][:, :2]  # from the point to its goal
        assert bool(((way * later[block]["expert_action"]).sum(1) >= 0).all())


def test_a_human_acts_where_the_policy_is_too_far_from_him_and_that_is_flagged() -> None:
    config = reach("env.num_envs=4", f"env.chunks_per_rollout={STEPS}").env
    columns = ("state", "action", "expert_action", "is_intervention")
    stage = EnvStage(EnvStageConfig(config, 3, transitions=columns, expert_iterations=1, tolerance=0.7))
    stage.setup(solo_context((0, 1)))
    first, later = rolled_out(stage, (0, 1), dims=2)
    assert all(bool(part["is_intervention"].all()) for part in first.values())
    human = torch.cat([part["is_intervention"] for part in later.values()]) > 0
    acted, wanted = (torch.cat([part[name] for part in later.values()]) for name in ("action", "expert_action"))
    policy = torch.stack([chosen(block, 1, step, 2)[:, 0] for block in (0, 1) for step in range(STEPS)]).flatten(0, 1)
    assert torch.equal(human, (policy - wanted).abs().amax(1) > 0.7)
    assert 0 < human.sum() < len(human)
    assert torch.equal(acted, torch.where(human[:, None], wanted, policy))


def test_transitions_hold_images_as_bytes_and_the_instruction() -> None:
    env = reach("env.num_envs=4", f"env.chunks_per_rollout={STEPS}").env
    env.cameras, env.instruction = ["base_camera"], "reach the point"
    stage = EnvStage(EnvStageConfig(env, 3, transitions=(STATE, EXPERT_ACTION, *seen_columns(env.cameras))))
    stage.setup(solo_context((0, 1)))
    first = stage.open(StepContext(0), (0, 1))
    for step in range(STEPS):
        stage.step(StepContext(0), {block: chosen(block, 0, step, 2) for block in (0, 1)})
    columns = stage.close(StepContext(0), {0: None, 1: None}).blocks[1]
    size = env.obs_size
    assert columns["images.base_camera"].shape == (2 * STEPS, size, size, 3)
    assert columns["images.base_camera"].dtype == torch.uint8
    seen = observation_of({name: column[:2] for name, column in columns.items()})
    shown = first[1]
    assert shown is not None
    assert torch.equal(stacked(seen), stacked(shown))
    assert torch.equal(seen.proprio, shown.proprio)
    assert seen.instruction == shown.instruction
