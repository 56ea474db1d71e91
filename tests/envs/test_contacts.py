"""The sum of contact impulses has the bits of ManiSkill's own, and grasps are found as ManiSkill finds them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.sim  # importing ManiSkill takes seconds


@pytest.mark.parametrize("num_points", [[], [0], [1], [4], [3, 0, 1], [40, 7]])
def test_the_total_impulse_is_that_of_maniskill_bit_for_bit(num_points: list[int]) -> None:
    from mani_skill.utils.sapien_utils import compute_total_impulse

    from envs.batched.contacts import total_impulse

    random = np.random.default_rng(0)

    def draw() -> SimpleNamespace:
        return SimpleNamespace(impulse=(random.standard_normal(3) * 10.0 ** random.integers(-6, 3)).astype("f4"))

    contacts = [
        (SimpleNamespace(points=[draw() for _ in range(count)]), bool(k % 2)) for k, count in enumerate(num_points)
    ]
    assert total_impulse(contacts).tobytes() == np.asarray(compute_total_impulse(contacts)).tobytes()


@pytest.mark.parametrize("robot", ["panda", "fetch", "so100"])
def test_a_grasp_is_where_maniskill_sees_one(robot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched.build import make_batched_task

    num_rows = 8
    env = make_batched_task("PickCube-v1", num_rows, False, robot_uids=robot)
    agent, scene = env.agent, env.scene
    stock = type(agent).is_grasping
    assert agent.is_grasping.func.__module__ == "envs.batched.scene"
    draw = torch.Generator().manual_seed(0)
    answers = []
    for trial in range(20):
        impulses = {
            finger: torch.randn(num_rows, 3, generator=draw)
            * (torch.rand(num_rows, 1, generator=draw) < 0.2 * (trial % 6))
            for finger in (agent.finger1_link, agent.finger2_link)
        }
        monkeypatch.setattr(scene, "get_pairwise_contact_impulses", lambda finger, _, of=impulses: of[finger])
        for limits in ((), (30.0,), (20.0, 60)):
            answers.append(agent.is_grasping(env.cube, *limits))
            assert torch.equal(answers[-1], stock(agent, env.cube, *limits))
    held = torch.cat(answers)
    assert 0 < held.sum() < len(held)
    env.close()
