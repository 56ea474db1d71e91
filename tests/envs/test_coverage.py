"""A cut of the coverage table: tasks of every kind beside stock ManiSkill, run as envs/batched/build.py says."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from rlinf_embodied.errors import SimulatorError

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True, scope="module")
def _renderer() -> None:
    """A task that loads a texture before any renderer exists would get one on another device than later tests."""
    from envs.stock import check_renderer

    check_renderer("cpu")


def make_pair(task: str, num_rows: int = 2, compared: list[int] | None = None, **kwargs: object):
    from envs.batched.build import known_difference, make_batched_task
    from envs.stock import build_task
    from experiments.bench.coverage.comparison import Pair

    fixed = {"obs_mode": "state_dict", "reward_mode": reward_of(task), **kwargs}
    assert known_difference(task, **fixed) == ""
    batched = make_batched_task(task, num_rows, False, **fixed)
    single = {"num_envs": 1, "sim_backend": "physx_cpu", "render_backend": "none", **fixed}
    return Pair(batched, lambda: build_task(task, **single), compared=compared)


def reward_of(task: str) -> str:
    from envs.maniskill_rows import reward_mode

    return reward_mode(task)


def test_episodes_with_contact_and_a_partial_reset_equal_those_of_stock_envs() -> None:
    from experiments.bench.coverage.comparison import compare_episodes, wild_actions

    pair = make_pair("UnitreeG1Stand-v1")  # feet on the ground
    difference = compare_episodes(pair, 12, wild_actions(pair.batched, seed=1))
    pair.close()
    assert difference == ""


def test_a_difference_is_found_and_named() -> None:
    pair = make_pair("PickCube-v1", robot_uids="panda")
    pair.reset([0, 1], [3, 4])
    assert pair.differences([0, 1]) == []
    pair.stock[1].cube.set_pose(pair.stock[1].cube.pose * pair.stock[1].goal_site.pose)
    found = pair.differences([0, 1])
    pair.close()
    assert {difference.row for difference in found} == {1}
    assert [difference.what for difference in found] == ["state 1: body cube"]


def test_the_table_is_looked_up_by_robot_and_control_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched import build

    joints = {"joints": "cube of row 1 differs"}
    table = {"versions": build.versions(), "tasks": {"PickCube-v1": {"default": {"default": ""}, "fetch": joints}}}
    monkeypatch.setattr(build, "_table", lambda: table)
    assert build.known_difference("PickCube-v1", obs_mode="rgb") == ""
    assert build.known_difference("PickCube-v1", robot_uids="fetch", control_mode="joints") == "cube of row 1 differs"
    assert build.known_difference("PickCube-v1", robot_uids="panda") is None
    assert build.known_difference("PickCube-v1", robot_init_qpos_noise=0.1) is None


def test_a_task_that_was_not_compared_or_differs_falls_back_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RotateValveLevel1 gives its rows three, four and five spokes in turn; a stock single env has three."""
    from envs import maniskill_rows as rows
    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig

    config = EnvConfig(task="RotateValveLevel1-v1", obs_size=16, options={"control_mode": "pd_joint_delta_pos"})
    for difference, reason in (("qpos differs by 1", "qpos differs"), (None, "env.options.backend=batched runs it")):
        monkeypatch.setattr(rows, "known_difference", lambda *_, known=difference, **__: known)
        with caplog.at_level(logging.WARNING, logger="envs"):
            env = make_env(config, 2)
        assert env.spec.backend == "physx_cpu (stock)"
        env.close()
        assert reason in caplog.text
    monkeypatch.setattr(rows, "known_difference", lambda *_, **__: "qpos differs by 1")
    with pytest.raises(SimulatorError, match=r"qpos differs by 1: use env.options.backend=stock"):
        make_env(replace(config, options=config.options | {"backend": "batched"}), 2)
