"""A cut of the coverage table: tasks of every kind beside stock ManiSkill, run as envs/batched/build.py says."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf_embodied.errors import SimulatorError

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True, scope="module")
def _renderer() -> None:
    """A task that loads a texture before any renderer exists would get one on another device than later tests."""
    from envs.maniskill import check_renderer

    check_renderer("cpu")


def make_pair(task: str, num_rows: int = 2, compared: list[int] | None = None, **kwargs: object):
    from envs.batched.build import check_equal, make_batched_task
    from envs.comparison import Pair
    from envs.stock import build_task

    fixed = {"obs_mode": "state_dict", "reward_mode": reward_of(task), **kwargs}
    check_equal(task, **fixed)
    batched = make_batched_task(task, num_rows, False, **fixed)
    single = {"num_envs": 1, "sim_backend": "physx_cpu", "render_backend": "none", **fixed}
    return Pair(batched, lambda: build_task(task, **single), compared=compared)


def reward_of(task: str) -> str:
    from envs.maniskill import reward_mode

    return reward_mode(task)


def test_episodes_with_contact_and_a_partial_reset_equal_those_of_stock_envs() -> None:
    from envs.comparison import compare_episodes, wild_actions

    pair = make_pair("UnitreeG1Stand-v1")  # feet on the ground
    outcome = compare_episodes(pair, 12, wild_actions(pair.batched, seed=1))
    pair.close()
    assert str(outcome) == ""
    assert outcome.row_steps == 2 * (12 + 6)


def test_a_difference_is_found_and_named() -> None:
    pair = make_pair("PickCube-v1", robot_uids="panda")
    pair.reset([0, 1], [3, 4])
    assert pair.differences([0, 1]) == []
    pair.stock[1].cube.set_pose(pair.stock[1].cube.pose * pair.stock[1].goal_site.pose)
    found = pair.differences([0, 1])
    pair.close()
    assert {difference.row for difference in found} == {1}
    assert [difference.what for difference in found] == ["state 1: body cube"]


def test_values_are_compared_by_row_and_nan_equals_nan() -> None:
    from envs.comparison import compare_row

    seen = {"a": torch.tensor([[1.0, float("nan")], [2.0, 5.0]]), "mean": torch.tensor(3.0), "ours": torch.zeros(2)}
    expected = {"a": torch.tensor([[1.0, float("nan")]]), "mean": torch.tensor(4.0)}
    assert [d.what for d in compare_row(seen, expected, 0, 2)] == ["ours"]
    sizes = {d.what: d.size for d in compare_row(seen, expected, 1, 2)}
    assert sizes == {"a": float("inf"), "ours": float("inf")}
    assert compare_row({"b": torch.tensor([1, 4])}, {"b": torch.tensor([1])}, 1, 2)[0].size == 3.0


def register_task(name: str, **methods: object) -> None:
    from mani_skill.envs.tasks.control.cartpole import CartpoleBalanceEnv
    from mani_skill.utils.registration import register_env

    cls = type(name, (CartpoleBalanceEnv,), {"__module__": __name__, **methods})
    register_env(f"{name}-v1", max_episode_steps=50, override=True)(cls)


def test_a_task_that_looks_at_its_first_row_only_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched import build

    def evaluate(self) -> dict:
        return {"success": (self.agent.robot.get_qpos()[0, :1] > 0).expand(self.num_envs)}

    def initialize(self, env_idx, options) -> None:
        self.agent.robot.set_qpos(torch.rand(len(env_idx), 2) - 0.5)

    register_task("FirstRow", evaluate=evaluate, _initialize_episode=initialize)
    monkeypatch.setattr(build, "LARGE", {})
    assert build.first_difference("FirstRow-v1").startswith("info/success of row 1 differs")


def test_a_task_whose_rows_are_built_differently_falls_back_and_says_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RotateValveLevel1 gives its rows three, four and five spokes in turn; a stock single env has three."""
    from envs.batched import build
    from envs.maniskill import make_env
    from rlinf_embodied.config import Backend, EnvConfig

    config = EnvConfig(
        task="RotateValveLevel1-v1", robot=None, control_mode="pd_joint_delta_pos", cameras=["base_camera"], obs_size=16
    )
    monkeypatch.setattr(build, "_covered", lambda *_: None)
    monkeypatch.setattr(build, "LARGE", {})
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="envs"):
        env = make_env(config, 2)
    assert env.spec.backend == "physx_cpu (stock)"
    env.close()
    messages = [record.getMessage() for record in caplog.records if record.name == "envs.stock"]
    assert len(messages) == 1
    assert "differs by" in messages[0]
    with pytest.raises(SimulatorError, match=r"of row \d differs by .*use env.backend=stock"):
        make_env(replace(config, backend=Backend.batched), 2)
    assert len(list((tmp_path / "differences").iterdir())) == 1  # what was found is kept
