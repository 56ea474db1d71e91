"""The batched CPU backend against stock ManiSkill, bit for bit: what is simulated, rewarded and seen."""

from __future__ import annotations

import gymnasium as gym
import pytest
import sapien
import torch
from torch import Tensor

pytestmark = pytest.mark.sim

SIZE = 32


def make_stock(task: str, control: str, **kwargs: object):
    import mani_skill.envs  # noqa: F401  registers the tasks

    return gym.make(
        task,
        control_mode=control,
        sim_backend="physx_cpu",
        render_backend="cpu",
        reconfiguration_freq=0,
        sensor_configs={"width": SIZE, "height": SIZE},
        **{"obs_mode": "state", **kwargs},
    ).unwrapped


def make_batched(task: str, num_envs: int, control: str, **kwargs: object):
    from envs.batched.build import make_batched_task

    sensors = {"width": SIZE, "height": SIZE}
    return make_batched_task(task, num_envs, True, control_mode=control, sensor_configs=sensors, **kwargs)


def physics_state(env) -> Tensor:
    parts = [v for kind in ("actors", "articulations") for v in env.get_state_dict()[kind].values()]
    return torch.cat(parts, 1)


def make_pair(task: str, num_envs: int, control: str, **kwargs: object):
    from experiments.bench.coverage.comparison import Pair

    kwargs = {**kwargs, "obs_mode": "state_dict"}
    return Pair(make_batched(task, num_envs, control, **kwargs), lambda: make_stock(task, control, **kwargs))


def test_a_scripted_grasp_with_images_and_a_partial_reset_is_equal() -> None:
    from envs.tasks import TaskView, pick_cube

    pair = make_pair("PickCube-v1", 3, "pd_ee_delta_pose", robot_uids="panda_wristcam")
    view = TaskView(pair.batched, True)
    pair.reset([0, 1, 2], [10, 11, 12])
    grasped = 0
    for k in range(24):
        if k == 13:
            pair.reset([1], [50])  # rows 0 and 2 hold their cubes
        actions = pick_cube(view)
        pair.step(actions, [0, 1, 2])
        assert not pair.differences([0, 1, 2], actions)
        grasped += int(pair.batched.get_info()["is_grasped"].sum())
    assert grasped > 20
    assert not pair.image_differences([2])  # it holds its cube
    pair.close()


@pytest.mark.parametrize(
    ("task", "control"),
    [
        ("RollBall-v1", "pd_joint_delta_pos"),  # the ball touches the ground in every scene
        ("StackCube-v1", "pd_ee_target_delta_pose"),  # targets accumulate and must survive others' resets
        ("PullCubeTool-v1", "pd_joint_vel"),
    ],
)
def test_random_episodes_with_partial_resets_are_equal(task: str, control: str) -> None:
    pair = make_pair(task, 2, control)
    pair.reset([0, 1], [20, 21])
    draw = torch.Generator().manual_seed(0)
    dim = pair.batched.single_action_space.shape[0]
    for k in range(24):
        if k == 12:
            pair.reset([1], [33])
        actions = torch.rand(2, dim, generator=draw) * 2 - 1
        pair.step(actions, [0, 1])
        assert not pair.differences([0, 1], actions)
    pair.close()


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1", "PullCube-v1"])
def test_rows_that_are_initialised_together_equal_rows_initialised_one_by_one(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_batched(task, 8, "pd_ee_delta_pose", robot_uids="panda_wristcam")
    assert type(env)._draws_by_row
    for rows in ([0, 1, 2, 3, 4, 5, 6, 7], [3], [1, 6], [0, 2, 5]):
        seeds = [31 * row + len(rows) for row in range(8)]
        together, alone = [], []
        for states, by_row in ((together, True), (alone, False)):
            monkeypatch.setattr(type(env), "_draws_by_row", by_row)
            env.begin(rows, [seeds[row] for row in rows])
            states.append(physics_state(env)[rows].clone())
        assert torch.equal(together[0], alone[0])
        assert len(together[0].unique(dim=0)) == len(rows)
    env.close()


def test_a_draw_that_is_not_by_row_is_refused() -> None:
    from envs.batched.seeds import row_draws

    stock = torch.rand
    with row_draws(lambda *size: torch.rand(*size), [1, 2, 3]) as draw:
        drawn = draw((3, 2))
        assert torch.rand is stock  # for everybody else
        with pytest.raises(AssertionError, match="a draw of size"):
            draw(2)
    integers = row_draws(lambda: torch.randint(0, 5, (3,)), [1, 2, 3])
    with pytest.raises(AssertionError, match="drawn by another call"), integers as draw:
        draw()
    alone = torch.rand(1, 2, generator=torch.Generator().manual_seed(2))
    assert torch.equal(drawn[1:2], alone)


def test_a_row_at_rest_is_neither_stepped_nor_given_targets() -> None:
    env = make_batched("PickCube-v1", 3, "pd_ee_delta_pose")
    env.begin([0, 1, 2], [1, 2, 3])
    before = physics_state(env).clone()
    targets = [[joint.get_drive_target().item() for joint in env.agent.robot._objs[i].active_joints] for i in range(3)]
    for _ in range(3):
        env.advance(torch.ones(3, 7), [0, 2])
    after = physics_state(env)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    assert [joint.get_drive_target().item() for joint in env.agent.robot._objs[1].active_joints] == targets[1]
    assert [joint.get_drive_target().item() for joint in env.agent.robot._objs[0].active_joints] != targets[0]
    env.close()


def test_stock_envs_of_the_same_process_behave_as_before() -> None:
    from mani_skill.envs import sapien_env

    untouched = sapien_env.parse_sim_and_render_backend, sapien.render.get_camera_shader_dir()
    alone = make_stock("PickCube-v1", "pd_ee_delta_pose")
    alone.reset(seed=4)
    env = make_batched("PickCube-v1", 2, "pd_ee_delta_pose")
    env.begin([0, 1], [4, 5])
    sapien.render.set_camera_shader_dir(untouched[1])  # ManiSkill sets it for each camera
    env.scene.px.recreate_scene(0)
    assert (sapien_env.parse_sim_and_render_backend, sapien.render.get_camera_shader_dir()) == untouched
    beside = make_stock("PickCube-v1", "pd_ee_delta_pose")
    beside.reset(seed=4)
    assert not beside.gpu_sim_enabled
    for k in range(5):
        action = torch.full((1, 7), 0.1 * k)
        alone.step(action)
        env.advance(torch.full((2, 7), 0.2 * k), [0, 1])
        beside.step(action)
    assert torch.equal(physics_state(alone), physics_state(beside))
    beside.goal_site.hide_visual()
    assert beside.goal_site.hidden
    for env_ in (alone, env, beside):
        env_.close()


def test_another_version_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched import build
    from envs.batched.build import known_difference
    from rlinf_embodied.errors import SimulatorError

    monkeypatch.setattr(build, "TESTED_VERSIONS", {"sapien": ("2.0.1", "2.0.2")})
    expected = r"sapien 3\.0\.\d+ .* 2\.0\.1 and 2\.0\.2 only.*sapien==2\.0\.2.*env.options.backend=stock"
    with pytest.raises(SimulatorError, match=expected):
        known_difference("PickCube-v1")
    with pytest.raises(SimulatorError, match=expected):
        make_batched("PickCube-v1", 1, "pd_joint_delta_pos")
