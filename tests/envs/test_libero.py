"""LIBERO's rows: which episode a seed stands for, what travels to their processes, and what happens when one fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import libero_stand_in
import pytest
import torch

from envs.episodes import EpisodeEnv
from envs.foreign.env import ForeignSimulator, adapter_of, make_env
from envs.libero import Libero, LiberoOptions
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError, HangError, SimulatorError

ADAPTER = "libero_stand_in.StandIn"
CONFIG = EnvConfig(
    _target_="envs.foreign.env.make_env",
    task="libero_goal",
    reward=Reward.sparse,
    cameras=["agentview", "robot0_eye_in_hand"],
    obs_size=4,
    num_envs=3,
    block_size=3,
    horizon=8,
    chunk=2,
    chunks_per_rollout=4,
    hold_steps=1,
    options={"adapter": ADAPTER, "processes": 2, "timeout_s": 60},
)
TRAINING = 1 << 30


@pytest.fixture
def env() -> Iterator[EpisodeEnv]:
    """Three rows in two processes: row 0, and rows 1 and 2."""
    made = make_env(CONFIG, 3, render_final=True)
    yield made
    made.close()


@pytest.fixture
def simulator(env: EpisodeEnv) -> ForeignSimulator:
    return env.simulator


def make(config: EnvConfig = CONFIG, **options: object) -> ForeignSimulator:
    return make_env(replace(config, options={"adapter": ADAPTER, **options}), config.num_envs).simulator


# -------------------------------------------------------------------------------------------------------------- starts
def suite(**options: object) -> Libero:
    return Libero("libero_goal", LiberoOptions(**options))


def test_500_evaluation_seeds_in_a_row_are_every_task_and_initial_state_once() -> None:
    starts = [suite().start(seed, range(10)) for seed in range(9000, 9500)]
    assert Counter((start.task, start.state) for start in starts) == Counter(
        (task, state) for task in range(10) for state in range(50)
    )
    assert [start.task for start in starts[:12]] == [*range(10), 0, 1]  # so that fewer episodes are of all tasks


def test_training_draws_its_own_initial_states_unless_asked_for_the_benchmarks() -> None:
    assert suite().start(TRAINING + 3, range(10)).state is None
    assert suite(train_on_benchmark=True).start(TRAINING + 3, range(10)).state in range(50)
    assert suite().start(TRAINING - 1, range(10)).state in range(50)
    assert {suite().start(seed, [4]).task for seed in (0, 1, TRAINING)} == {4}


# ----------------------------------------------------------------------------------------------------------- simulator
def test_each_row_has_the_task_and_state_of_its_seed_and_its_own_actions(simulator: ForeignSimulator) -> None:
    simulator.reset([0, 1, 2], [0, 21, TRAINING + 2])
    assert [task.name for task in simulator.tasks] == [
        "libero_goal_0",
        "libero_goal_1",
        f"libero_goal_{(TRAINING + 2) % 10}",
    ]
    actions = torch.arange(21, dtype=torch.float32).reshape(3, 7) / 10
    simulator.step(actions, [0, 2])
    state = simulator.measure(actions).checked(3, simulator)
    assert state.proprio[:, 1].tolist() == [0, 2, -1]  # initial states; the last one is drawn
    torch.testing.assert_close(state.proprio[:, 2:], (actions * torch.tensor([[1], [0], [1]])).clamp(max=1.0)[:, :6])
    assert not state.success.any()


def test_images_are_turned_for_the_policy_and_upright_for_people(simulator: ForeignSimulator) -> None:
    simulator.reset([0, 1, 2], [5, 6, 8])
    seen = torch.stack(list(simulator.images([2, 0]).values()), 1)
    assert seen.shape == (2, 2, 4, 4, 3)
    assert seen[:, :, 3, 3, 0].tolist() == [[255, 200], [255, 200]]  # turned by 180 degrees
    assert seen[:, 0, 0, 0, 0].tolist() == [8, 5]
    assert simulator.film([1], 6)[1][5, 0].tolist() == [255] * 3  # upright


def test_an_episode_has_its_instruction_and_ends_with_its_tasks_name(env: EpisodeEnv) -> None:
    assert env.reset([3, 4, 5]).instruction == ("do 3", "do 4", "do 5")
    push = torch.zeros(3, 2, 7)
    push[1, :, 0] = 1.0
    env.step_chunk(push)
    result = env.step_chunk(push, next_seeds=[16, 17, 18])  # row 1 has added up to 3 in its third step
    assert [(end.row, end.task, end.metrics["episode_len"]) for end in result.episodes] == [(1, "libero_goal_4", 3.0)]
    assert result.rewards[1].tolist() == [1.0, 0.0]
    assert result.final_observation is not None
    assert result.final_observation.instruction == ("do 4",)
    assert result.observation.instruction == ("do 3", "do 7", "do 5")


def test_one_task_of_a_suite_can_be_chosen() -> None:
    simulator = make(task=6)
    simulator.reset([0, 1, 2], [0, 1, 2])
    assert {task.name for task in simulator.tasks} == {"libero_goal_6"}
    assert simulator.measure(torch.zeros(3, 7)).proprio[:, :2].tolist() == [[6, 0], [6, 1], [6, 2]]
    simulator.close()


# -------------------------------------------------------------------------------------------------------------- faults
def test_a_process_that_dies_is_named_with_what_it_said_last(simulator: ForeignSimulator) -> None:
    with pytest.raises(SimulatorError) as error:
        simulator.reset([0, 1], [0, libero_stand_in.DIES])
    text = str(error.value)
    assert "LIBERO process 1 (rows 1-2), pid" in text
    assert "ended with code 13 during 'reset'" in text
    assert "the memory is full" in text
    with pytest.raises(SimulatorError, match="ended with code 13"):
        simulator.step(torch.zeros(3, 7), [1])


def test_a_process_that_hangs_is_named_and_ended(simulator: ForeignSimulator, monkeypatch) -> None:
    monkeypatch.setattr("envs.foreign.process._CLOSE_S", 0.2)
    for process in simulator._links:
        process._timeout_s = 0.5
    words = r"process 0 \(rows 0-0\).*has not answered 'reset' for 0\.5 s.*env\.options\.timeout_s"
    with pytest.raises(HangError, match=words):
        simulator.reset([0], [libero_stand_in.HANGS])
    pids = [process.pid for process in simulator._links]
    simulator.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_exception_keeps_its_words_and_other_rows_their_answers(simulator: ForeignSimulator) -> None:
    with pytest.raises(SimulatorError, match=r"rows 0-0\) failed in 'reset': ValueError: no such drawer"):
        simulator.reset([0, 1, 2], [libero_stand_in.REFUSES, 1, 2])
    simulator.reset(
        [0, 1, 2], [10, 11, 12]
    )  # the answers of the other process to the first question are not taken here
    assert simulator.measure(torch.zeros(3, 7)).proprio[:, :2].tolist() == [[0, 1], [1, 1], [2, 1]]


# -------------------------------------------------------------------------------------------------------------- config
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"task": "libero_7", "options": {"suite": "7"}},
            "env.options.suite is '7'.*spatial, object, goal, 10, 90, spatial_swap, .*",
        ),
        ({"options": {"settle_step": 3}}, "env.options.settle_step is 3.*did you mean env.options.settle_steps"),
        ({"options": {"task": 10}}, "env.options.task is 10, but libero_goal has tasks 0 to 9"),
        ({"options": {"rotate": 90}}, "env.options.rotate is 90.*use 180"),
        ({"reward": Reward.dense}, "env.reward is 'dense'.*use sparse"),
        ({"cameras": ["base_camera"]}, "env.cameras is 'base_camera'.*use agentview"),
    ],
)
def test_what_libero_cannot_do_is_said_before_anything_starts(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapter_of(replace(CONFIG, **(changes | {"options": {"adapter": ADAPTER, **changes.get("options", {})}})))


LIBERO = replace(CONFIG, options={"adapter": "envs.libero.Libero"})


def test_a_missing_environment_names_its_folder_and_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_LIBERO", str(tmp_path))
    with pytest.raises(SimulatorError, match=rf"{tmp_path} does not exist.*experiments\.setup\.foreign env=libero"):
        make_env(LIBERO, 3)


def test_a_python_without_libero_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.setenv("RLINF_EMBODIED_LIBERO", str(tmp_path))
    with pytest.raises(
        SimulatorError, match="LIBERO cannot be imported: ModuleNotFoundError: No module named 'libero'"
    ):
        make_env(LIBERO, 1)


@pytest.mark.parametrize("suite", ["spatial", "object", "goal", "10", "90", "spatial_lan", "goal_swap", "10_task"])
def test_every_suite_is_a_choice_that_libero_can_run_for_the_benchmarks_time(suite: str) -> None:
    env = compose_evaluate(["env=libero", f"env.options.suite={suite}", "policy=random"]).env
    adapter_of(env)
    assert env.task == f"libero_{suite}"
    steps = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
    assert env.horizon == steps[suite.partition("_")[0]]
    assert env.chunks_per_rollout == env.chunks_per_episode
    assert env.hold_steps == 1  # an episode ends at its first success
