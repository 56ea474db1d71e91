"""PickCube with policy and learner on an accelerator, its simulator on the CPU or handing out tensors of the device."""

from __future__ import annotations

import pytest
import torch
from accelerated_runs import executor_on_sim
from device_tasks import make_env as make_device_env
from runs import iterate, tiny, trees

from policies.tiny_vla import TinyVLA
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import save_policy
from tests.observations import stacked

_FORKS = pytest.mark.filterwarnings("ignore:SIM reports that you have")  # ManiSkill's resets, of all generators
pytestmark = [pytest.mark.accelerator, pytest.mark.sim, _FORKS]

PICK = ["env=maniskill_pick", "env.num_envs=4", "env.block_size=2", "env.obs_size=32", "env.chunk=5"]
SHORT = ["env.horizon=10", "env.chunks_per_rollout=3", "algorithm.critic_warmup_iterations=0"]
ON_DEVICE = "env._target_=device_tasks.make_env"


def test_the_gpu_simulator_s_own_code_runs_with_tensors_of_the_device(tmp_path) -> None:
    config = tiny(*PICK, *SHORT, ON_DEVICE)
    env = make_env(config.env, config.env.block_size, "cpu")
    save_policy(TinyVLA(config.policy, env.spec, seed=0), tmp_path, config.env, config.policy)
    env.close()
    executor = executor_on_sim(config, trees("all", "all", "all"), 1, tmp_path)
    metrics = iterate(config, executor, 1)
    assert metrics[0]["rollout/env_steps"] > 0
    assert metrics[0]["losses/initial_log_ratio"] <= 1e-5


@pytest.mark.slow
def test_the_gpu_simulator_shows_films_and_answers_on_the_device() -> None:
    config = tiny(*PICK, *SHORT).env
    env = make_device_env(config, 4, "sim:1", True)
    env.record([1], 32)
    seen = env.reset([1, 2, 2, 3])
    where = torch.device("sim:1")
    assert {stacked(seen).device, seen.proprio.device, env.expert_actions().device} == {where}
    physx, controller = env.simulator.task.scene.px, env.simulator.task.agent.controller.controllers["arm"]
    assert {physx.cuda_rigid_body_data.torch().device, physx.cuda_articulation_qpos.torch().device} == {where}
    assert controller.kinematics.use_gpu_ik
    assert torch.equal(seen.proprio[1].cpu(), seen.proprio[2].cpu())  # rows with one seed start from one state
    result = env.step_chunk(lambda _: env.expert_actions(), next_seeds=[5, 6, 7, 8])
    assert {result.rewards.device, result.valid.device, result.observation.proprio.device} == {where}
    assert controller._target_qpos.device == where
    (frames,) = env.take_frames().values()
    assert [tuple(frame.shape) for frame in frames] == [(32, 32, 3)] * 5
    env.close()
