"""MetaWorld's rows: what config may say, what a seed stands for, and, where it is installed, that episodes repeat.

The latter are skipped where its environment is missing (python -m experiments.setup.foreign env=metaworld).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import folder_of
from envs.foreign.env import make_env, read_options
from envs.foreign.process import environment_of
from policies.tokenizer import WordTokenizer
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError
from tests.observations import stacked

REFERENCE = Path(__file__).resolve().parents[1] / "metaworld_reference.py"
PYTHON = folder_of("metaworld") / "bin/python"
INSTALLED = pytest.mark.skipif(not PYTHON.exists(), reason="needs python -m experiments.setup.foreign env=metaworld")
INSTRUCTIONS = compose_evaluate(["env=metaworld", "policy=random"]).env.options["instructions"]
MT10 = [
    f"{name}-v3"
    for name in (
        *("reach", "push", "pick-place", "door-open", "drawer-open", "drawer-close", "button-press-topdown"),
        *("peg-insert-side", "window-open", "window-close"),
    )
]
TRAINING = 1 << 30


def section(task: str = "mt10", options: dict[str, object] | None = None, **changes: object) -> EnvConfig:
    env = compose_evaluate(["env=metaworld", f"env.task={task}", "policy=random"]).env
    return replace(env, num_envs=2, block_size=2, obs_size=16, options={**env.options, **(options or {})}, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "drawer-opn-v3"}, "env.task is 'drawer-opn-v3'.*did you mean drawer-open-v3"),
        ({"horizon": 505}, "env.horizon is 505, but MetaWorld's episodes have at most 500 steps.*use 500 or less"),
        ({"cameras": ["base_camera"]}, "env.cameras is 'base_camera'.*use corner"),
        ({"options": {"pictures": "dark"}}, "env.options.pictures is 'dark'"),
        ({"options": {"timeout_s": 0}}, "env.options.timeout_s is 0"),
    ],
)
def test_what_metaworld_cannot_do_is_said_before_anything_starts(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_options(section(**({"task": "mt10"} | changes)))


def test_each_of_the_50_tasks_has_an_instruction_that_the_small_policy_tells_apart() -> None:
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS) == 50
    codes = WordTokenizer(8)([INSTRUCTIONS[task] for task in MT10])
    assert len({tuple(code) for code in codes.tolist()}) == 10


@pytest.fixture(scope="module")
def env() -> Iterator[EpisodeEnv]:
    made = make_env(section(horizon=100), 2)
    yield made
    made.close()


@INSTALLED
def test_rows_take_their_tasks_in_turn_and_tell_them_by_the_instruction_alone(env: EpisodeEnv) -> None:
    seen = env.reset([3, TRAINING + 8])
    assert seen.instruction == ("open the door", INSTRUCTIONS[MT10[(TRAINING + 8) % 10]])
    assert seen.proprio.shape == (2, 4)
    assert seen.privileged is not None
    assert seen.privileged.shape == (2, 39 + 10 + 3)
    assert seen.privileged[:, 39:49].argmax(1).tolist() == [3, (TRAINING + 8) % 10]
    assert (seen.privileged[0, :39] != seen.privileged[1, :39]).any()


@INSTALLED
def test_episodes_can_be_of_some_tasks_of_a_suite_alone() -> None:
    made = make_env(section(options={"tasks": ["drawer-open-v3", "push-v3"]}), 2)
    seen = made.reset([4, 7])
    made.close()
    assert seen.instruction == (INSTRUCTIONS["drawer-open-v3"], INSTRUCTIONS["push-v3"])
    assert seen.privileged is not None
    assert seen.privileged[:, 39:49].argmax(1).tolist() == [4, 1]  # numbers are those of the suite
    with pytest.raises(ConfigError, match=r"env\.options\.tasks is 'hammer-v3', but mt10 has no such task"):
        make_env(section(options={"tasks": ["hammer-v3"]}), 2)


@INSTALLED
def test_the_expert_opens_a_drawer_and_the_episode_ends(env: EpisodeEnv) -> None:
    env.reset([4, 14])
    ends = []
    while len(ends) < 2:
        ends += env.step_chunk(lambda _: env.expert_actions()).episodes
    assert [(end.task, end.metrics["success_once"]) for end in ends] == [("drawer-open-v3", 1.0)] * 2


@INSTALLED
@pytest.mark.parametrize(
    "tasks", [("peg-insert-side-v3", "door-open-v3"), pytest.param(tuple(INSTRUCTIONS), marks=pytest.mark.slow)]
)
def test_episodes_are_the_benchmarks_whatever_ran_before(tasks: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit: ours after other episodes against an env that was just built and set to the same task."""
    out = tmp_path / "compared.npz"
    command = [str(PYTHON), "-P", str(REFERENCE), str(out), "20", *tasks]
    done = subprocess.run(command, env=environment_of(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = np.load(out)
    for task in tasks:
        np.testing.assert_array_equal(told[f"{task} ours"], told[f"{task} theirs"])
        assert not np.array_equal(told[f"{task} ours"][0], told[f"{task} ours"][-1])
        assert not np.array_equal(told[f"{task} ours"], told[f"{task} other"])


@INSTALLED
def test_pictures_can_be_the_benchmarks_own_and_are_lit_alike(env: EpisodeEnv) -> None:
    full = make_env(section(options={"pictures": "benchmark"}), 2)
    ours, theirs = stacked(env.reset([0, 4])), stacked(full.reset([0, 4]))
    full.close()
    assert ours is not None
    assert theirs is not None
    apart = (ours.float() - theirs.float()).abs()
    assert 0 < float(apart.mean()) < 25
