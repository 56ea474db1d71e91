"""ManiSkill behind the protocol: names, backends, experts, goals, fallbacks and the errors people meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError, SimulatorError
from tests.observations import stacked

pytestmark = pytest.mark.sim

WRIST = {"robot": "panda_wristcam"}
SMALL = EnvConfig(num_envs=8, block_size=8, obs_size=16, options=WRIST)
BLIND = replace(SMALL, cameras=[])


def make(config: EnvConfig, num_envs: int = 1, **kwargs: object):
    from envs.maniskill import make_env

    return make_env(config, num_envs, **kwargs)


@pytest.mark.parametrize(
    ("task", "instruction"),
    [
        ("PickCube-v1", "pick up the cube"),
        ("PushCube-v1", "push the cube to the goal"),
        ("PullCube-v1", "pull the cube to the goal"),
        ("StackCube-v1", "stack the red cube on the green cube"),
    ],
)
def test_the_expert_solves_every_one_of_eight_seeds(task: str, instruction: str) -> None:
    env = make(replace(SMALL, task=task, cameras=[]), 8)
    assert set(env.reset(range(500, 508)).instruction) == {instruction}
    ends = [end for _ in range(10) for end in env.step_chunk(lambda _: env.expert_actions()).episodes]
    env.close()
    assert [end.metrics["success_once"] for end in ends] == [1.0] * 8


def test_the_proprioception_is_joints_tool_goal_and_the_way_to_it_and_the_goal_can_be_left_out() -> None:
    env = make(BLIND)
    seen = env.reset([3])
    task = env.simulator.task
    tool, goal = task.agent.tcp_pose, task.goal_site.pose.p
    expected = torch.cat([task.agent.robot.get_qpos(), tool.raw_pose, goal, goal - tool.p], 1)
    assert torch.equal(seen.proprio, expected)
    assert env.spec.proprio_dim == 9 + 7 + 3 + 3
    env.close()
    env = make(replace(BLIND, options=WRIST | {"goal_in_proprio": False}))
    assert torch.equal(env.reset([3]).proprio[:, -6:], torch.zeros(1, 6))
    env.close()
    env = make(replace(BLIND, options=WRIST | {"objects_in_proprio": True}))
    seen, task = env.reset([3]), env.simulator.task
    cube = task.cube.pose.p
    assert torch.equal(seen.proprio, torch.cat([expected, cube, cube - task.agent.tcp_pose.p], 1))
    env.close()


def test_the_privileged_state_holds_what_a_critic_wants() -> None:
    env = make(BLIND, 2)
    seen = env.reset([3, 4])
    task = env.simulator.task
    cube, tcp, goal = task.cube.pose.raw_pose, task.agent.tcp_pose.raw_pose, task.goal_site.pose.p
    robot = task.agent.robot
    expected = [robot.get_qpos(), robot.get_qvel(), tcp, cube, (cube - tcp)[:, :3] * 5, goal, (goal - cube[:, :3]) * 5]
    assert seen.privileged is not None
    assert torch.equal(seen.privileged[:, :-4], torch.cat(expected, 1))
    assert torch.equal(
        seen.privileged[:, -4:], torch.tensor([[0.0, -1.0, -1.0, -1.0]] * 2)
    )  # grasped, time, phase, held
    result = env.step_chunk(torch.zeros(2, 5, 7))
    assert result.privileged is not None
    assert result.privileged[0, :, -3].tolist() == pytest.approx([k / 50 * 2 - 1 for k in range(5)])
    assert result.privileged[0, :, -2].tolist() == pytest.approx([-1.0, -0.6, -0.2, 0.2, 0.6])
    env.close()


@pytest.mark.slow
def test_goal_markers_are_seen_only_if_asked() -> None:
    images = {}
    for shown in (False, True):
        options = WRIST | {"show_goal": shown, "decimate": False}
        env = make(replace(SMALL, task="PushCube-v1", obs_size=64, options=options), 4)
        images[shown] = stacked(env.reset(range(4)))
        assert env.simulator.task.goal_region.px_body_type == "kinematic"
        env.close()
    assert (images[True] != images[False]).any(-1).sum() > 10


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"task": "PickCub-v1"}, ConfigError, "env.task is 'PickCub-v1'.*did you mean PickCube-v1"),
        ({"options": {"robot": "pandda"}}, ConfigError, "env.options.robot is 'pandda'.*did you mean panda"),
        ({"cameras": ["base_camera", "wrist"]}, ConfigError, "env.cameras has wrist.*are: base_camera, hand_camera"),
        ({"options": {"control_mode": "pd_ee_delta"}}, ConfigError, "env.options.control_mode.*pd_ee_delta_pose"),
        ({"options": {"slow_s": 1.0}}, ConfigError, r"env.options.slow_s is 1.0"),
        ({"options": {"backend": "gpu"}}, SimulatorError, "needs a CUDA device"),
        (
            {"task": "MS-CartpoleSwingUp-v1"},
            SimulatorError,
            "MS-CartpoleSwingUp-v1 cannot be built with env.options.robot=panda_w",
        ),
        ({"task": "PickCubeWidowXAI-v1", "options": {}}, SimulatorError, "widowxai has assets available for download"),
        ({"task": "PickSingleYCB-v1"}, SimulatorError, "needs assets.*download_asset PickSingleYCB-v1"),
    ],
)
def test_what_cannot_be_built_is_named_with_the_way_out(changes: dict, error: type[Exception], words: str) -> None:
    if changes.get("options") == {"backend": "gpu"} and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(error, match=words):
        make(replace(SMALL, **changes))


def test_a_task_with_a_moving_film_camera_is_filmed() -> None:
    config = replace(SMALL, task="MS-HopperHop-v1", cameras=["cam0"], options={"control_mode": "pd_joint_delta_pos"})
    env = make(config)
    env.reset([1])
    env.record([0], size=32)
    env.step_chunk(torch.zeros(1, 5, env.spec.action_dim))
    frames = env.take_frames()[0]
    env.close()
    assert [tuple(frame.shape) for frame in frames] == [(32, 32, 3)] * 5
    assert frames[0].float().std() > 1


def test_a_task_without_a_dense_reward_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.envs.tasks import PickCubeEnv

    monkeypatch.setattr(PickCubeEnv, "SUPPORTED_REWARD_MODES", ("sparse", "none"))
    with pytest.raises(ConfigError, match=r"env.reward is dense_delta.*use env.reward=sparse"):
        make(SMALL)
    env = make(replace(SMALL, reward=Reward.sparse, hold_steps=1, cameras=[]), 2)
    env.reset([1, 2])
    ends = [end for _ in range(10) for end in env.step_chunk(lambda _: env.expert_actions()).episodes]
    env.close()
    assert [end.metrics["return"] for end in ends] == [1.0, 1.0]  # ManiSkill's sparse reward: 1 in the solved step


def test_without_a_vulkan_device_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sapien

    def refuse(device: object) -> None:
        raise RuntimeError('Failed to find a supported physical device "cpu"')

    monkeypatch.setattr(sapien.render, "RenderSystem", refuse)
    with pytest.raises(SimulatorError, match=r"no Vulkan device.*make setup.*apt-get install -t bookworm-backports"):
        make(SMALL)


@pytest.mark.gpu
def test_the_expert_solves_the_task_on_a_cuda_simulator() -> None:
    env = make(replace(SMALL, options=SMALL.options | {"backend": "gpu"}), 8, device="cuda:0")
    seen = env.reset(range(8))
    assert stacked(seen).is_cuda
    ends = [end for _ in range(10) for end in env.step_chunk(lambda _: env.expert_actions()).episodes]
    env.close()
    assert sum(end.metrics["success_once"] for end in ends) >= 6
