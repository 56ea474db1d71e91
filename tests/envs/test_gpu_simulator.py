"""One stock GPU env whose rows begin, rest and end one by one, on a stand-in for PhysX (simulated_physx)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError

pytestmark = pytest.mark.sim

ROWS = 4
CONFIG = EnvConfig(
    num_envs=ROWS,
    block_size=ROWS,
    obs_size=64,
    options={"robot": "panda_wristcam", "control_mode": "pd_ee_target_delta_pose"},
)


@pytest.fixture(scope="module")
def env():
    """Rows whose controller keeps targets between steps."""
    from device_tasks import make_env

    made = make_env(CONFIG, ROWS)
    yield made
    made.close()


@pytest.fixture
def simulator(env):
    """Its simulator, all rows in their first state."""
    env.simulator.reset(range(ROWS), [1, 2, 3, 4])
    env.simulator.measure(torch.zeros(ROWS, 7))
    return env.simulator


def arm(simulator):
    """The end effector's controller."""
    return simulator.task.agent.controller.controllers["arm"]


def moving(value: float = 0.5) -> Tensor:
    return torch.full((ROWS, 7), value)


# -------------------------------------------------------------------------------------------------------------- at rest
def test_a_row_at_rest_shows_where_it_came_to_rest_while_others_continue(simulator) -> None:
    simulator.step(moving(), [0, 1, 2, 3])
    before = simulator.measure(moving())
    for _ in range(3):
        simulator.step(moving(), [1, 2, 3])
        after = simulator.measure(moving())
    joints = simulator.task.agent.robot.get_qpos()
    assert not torch.allclose(joints[0], before.proprio[0, :9], atol=1e-3)  # the physics has moved it on
    for name in ("reward", "success", "proprio", "privileged"):
        assert torch.equal(getattr(before, name)[0], getattr(after, name)[0]), name
    assert not torch.allclose(before.proprio[1], after.proprio[1], atol=1e-3)
    simulator.reset([0], [9])
    fresh = simulator.measure(moving())
    assert not torch.equal(fresh.proprio[0], before.proprio[0])
    assert torch.allclose(fresh.proprio[1], after.proprio[1], atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- resets
def test_a_reset_of_some_rows_leaves_the_targets_of_the_others(simulator) -> None:
    simulator.step(moving(), range(ROWS))
    pose, joints = arm(simulator)._target_pose.raw_pose.clone(), arm(simulator)._target_qpos.clone()
    simulator.reset([2], [11])
    same = [(arm(simulator)._target_pose.raw_pose[row] == pose[row]).all().item() for row in range(ROWS)]
    assert same == [True, True, False, True]
    same = [(arm(simulator)._target_qpos[row] == joints[row]).all().item() for row in range(ROWS)]
    assert same == [True, True, False, True]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1, 2, 0]], ids=["in order", "in any order"])
def test_rows_with_one_seed_start_from_one_state_their_targets_included(simulator, rows: list[int]) -> None:
    simulator.step(moving(), range(ROWS))
    seeds = {0: 7, 1: 8, 2: 7, 3: 8}
    simulator.reset(rows, [seeds[row] for row in rows])
    first = simulator.measure(moving())
    targets = arm(simulator)._target_pose.raw_pose
    for row, leader in ((2, 0), (3, 1)):
        assert torch.equal(first.proprio[row], first.proprio[leader])
        assert torch.equal(targets[row], targets[leader])
    assert not torch.allclose(targets[0], targets[1], atol=1e-4)
    simulator.step(moving(), range(ROWS))
    then = simulator.measure(moving())
    assert torch.allclose(then.proprio[2], then.proprio[0], atol=1e-4)
    assert torch.allclose(then.proprio[3], then.proprio[1], atol=1e-4)


def test_contacts_of_an_episode_that_is_over_are_forgotten(simulator) -> None:
    task = simulator.task
    for _ in range(2):
        simulator.step(moving(0.0), range(ROWS))
    pressed = task.cube.get_net_contact_impulses()[:, 2]
    assert (pressed > 0).all()  # each cube lies on its table
    simulator.reset([1], [5])
    table = task.table_scene.table
    for impulses in (task.cube.get_net_contact_impulses(), task.scene.get_pairwise_contact_impulses(task.cube, table)):
        assert (impulses.abs().sum(1) > 0).tolist() == [True, False, True, True]
    simulator.step(moving(0.0), range(ROWS))
    simulator.step(moving(0.0), range(ROWS))
    assert (task.cube.get_net_contact_impulses()[:, 2] > 0).all()


def test_a_copy_takes_what_the_reset_has_drawn_and_leaves_what_was_built() -> None:
    from envs.gpu_simulator import ResetValues

    task = SimpleNamespace(
        num_envs=3,
        agent=None,
        drawn=torch.tensor([1, 2, 3]),
        replaced=torch.zeros(3, 2),
        built=torch.tensor([4.0, 5.0, 6.0]),
        shared=torch.zeros(1, 2).expand(3, 2),
        limits=torch.zeros(2),
    )
    values = ResetValues(task)
    task.drawn[torch.tensor([0, 1])] = torch.tensor([2, 2])  # row 1 draws what it had
    task.replaced = torch.arange(6.0).view(3, 2)
    task.shared = torch.ones(1, 2).expand(3, 2)
    values.copy(torch.tensor([2]), torch.tensor([0]))
    assert task.drawn.tolist() == [3, 2, 3]
    assert task.replaced.tolist() == [[4.0, 5.0], [2.0, 3.0], [4.0, 5.0]]
    assert task.built.tolist() == [4.0, 5.0, 6.0]


def test_rows_that_were_built_of_other_objects_are_no_group() -> None:
    from envs.gpu_simulator import require_alike

    robot = SimpleNamespace(name="panda", merged=True, _objs=[0, 1])
    cube = SimpleNamespace(name="cube", merged=False, _objs=[0, 1])
    pegs = SimpleNamespace(name="peg", merged=True, _objs=[0, 1])

    def task(*actors: SimpleNamespace) -> SimpleNamespace:
        registry = SimpleNamespace(actors={a.name: a for a in actors}, articulations={"panda": robot})
        agent = SimpleNamespace(robot=robot)
        return SimpleNamespace(num_envs=2, agent=agent, scene=SimpleNamespace(state_dict_registry=registry))

    require_alike(task(cube))
    with pytest.raises(SimulatorError, match=r"differ in peg.*env.options.backend=batched, or algorithm=ppo"):
        require_alike(task(cube, pegs))


# --------------------------------------------------------------------------------------------------------------- images
def test_a_task_without_a_camera_for_people_is_filmed_by_its_first_sensor(simulator, monkeypatch) -> None:
    usual = simulator.film([1, 2], 32)
    monkeypatch.setattr(simulator.task, "_human_render_cameras", {})
    monkeypatch.setattr(simulator.task.scene, "human_render_cameras", {})
    assert simulator.task.render_rgb_array() is None
    films = simulator.film(range(ROWS), 64)
    assert {row: tuple(film.shape) for row, film in films.items()} == dict.fromkeys(range(ROWS), (64, 64, 3))
    assert usual[1].shape == (32, 32, 3)
    hidden = next(iter(simulator.images(range(ROWS)).values()))
    shown = torch.stack([films[row] for row in range(ROWS)])
    assert (shown != hidden).any(-1).sum() > 10  # a film shows the goal, a policy does not see it
    monkeypatch.setattr(simulator.task.scene, "sensors", {})
    with pytest.raises(SimulatorError, match=r"has no camera to film with: use eval.record_video=false"):
        simulator.film([1], 16)


def test_a_goal_that_can_be_touched_is_not_hidden(simulator) -> None:
    from envs.gpu_simulator import require_hideable

    require_hideable("PickCube-v1", simulator.task.goal_site)
    with pytest.raises(
        ConfigError, match=r"env.options.show_goal is false.*env.options.show_goal=true, or env.options.backend=batched"
    ):
        require_hideable("PickCube-v1", simulator.task.cube)


# ------------------------------------------------------------------------------------------------------- what is needed
def test_without_network_the_place_of_physx_s_library_is_named(tmp_path, monkeypatch) -> None:
    from sapien import physx

    from envs import maniskill_rows

    def refuse() -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(maniskill_rows.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(physx, "enable_gpu", refuse)
    with pytest.raises(SimulatorError, match=rf"unzip release .* into {tmp_path}/.sapien/physx/{physx.version()}"):
        maniskill_rows._enable_gpu_physics()
