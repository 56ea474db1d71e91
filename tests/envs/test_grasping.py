"""Grasps are found as ManiSkill finds them."""

import pytest
import torch

pytestmark = pytest.mark.sim
NUM_ROWS = 8


@pytest.mark.parametrize("robot", ["panda", "fetch", "so100"])
def test_a_grasp_is_where_maniskill_sees_one(robot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched.build import make_batched_task

    env = make_batched_task("PickCube-v1", NUM_ROWS, False, robot_uids=robot)
    agent, scene = env.agent, env.scene
    stock = type(agent).is_grasping
    assert agent.is_grasping.func.__module__ == "envs.batched.scene"
    draw = torch.Generator().manual_seed(0)
    answers = []
    for trial in range(20):
        impulses = {
            finger: torch.randn(NUM_ROWS, 3, generator=draw)
            * (torch.rand(NUM_ROWS, 1, generator=draw) < 0.2 * (trial % 6))
            for finger in (agent.finger1_link, agent.finger2_link)
        }
        monkeypatch.setattr(scene, "get_pairwise_contact_impulses", lambda finger, _, of=impulses: of[finger])
        for limits in ((), (30.0,), (20.0, 60)):
            answers.append(agent.is_grasping(env.cube, *limits))
            assert torch.equal(answers[-1], stock(agent, env.cube, *limits))
    held = torch.cat(answers)
    assert 0 < held.sum() < len(held)
    env.close()
