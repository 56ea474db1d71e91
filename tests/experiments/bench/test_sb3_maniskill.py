"""SB3's PPO is given the same task by both arms, and does all of the work in each."""

from __future__ import annotations

import pytest

from experiments.bench import sb3_maniskill
from experiments.bench.harness import Run
from rlinf_embodied.errors import ConfigError


@pytest.mark.sim
@pytest.mark.parametrize("size", [None, 16], ids=["state", "images"])
def test_both_arms_show_as_much_and_take_the_same_actions(size) -> None:
    envs = [make("PickCube-v1", 1, size) for make in (sb3_maniskill.stock, sb3_maniskill.ours)]
    assert envs[0].action_space == envs[1].action_space
    sizes = []
    for env in envs:
        parts = env.observation_space.spaces if size else {"state": env.observation_space}
        sizes.append(sorted((space.shape for space in parts.values()), key=len))
        env.close()
    assert [shapes[1:] for shapes in sizes] == ([[(16, 16, 3)]] * 2 if size else [[], []])
    assert sizes[0][0][0] == pytest.approx(sizes[1][0][0], abs=15)  # the state, and what is there of the robot's own


@pytest.mark.sim
def test_both_arms_do_all_of_the_work(monkeypatch) -> None:
    monkeypatch.setattr(sb3_maniskill, "ITERATION", 16)
    report = sb3_maniskill.measure(Run(sb3_maniskill.Options(rounds=1, modes="state", num_envs=2, learn=16), [], {}))
    assert set(report.content["env_steps_per_s"]["state"]) == {"stock", "ours"}
    assert "state: ours / stock" in report.text


def test_rows_divide_an_iteration() -> None:
    with pytest.raises(ConfigError, match="num_envs is 7, but an iteration has 512"):
        sb3_maniskill.measure(Run(sb3_maniskill.Options(num_envs=7), [], {}))
