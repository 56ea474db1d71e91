"""Inverse kinematics in SIMD lanes against SAPIEN's solver: the same float32 targets, whoever solves a row."""

from __future__ import annotations

import logging

import gymnasium as gym
import numpy as np
import pytest
import sapien
import torch

pytestmark = pytest.mark.sim

HOME = {"panda_wristcam": [0, np.pi / 8, 0, -5 * np.pi / 8, 0, 3 * np.pi / 4, np.pi / 4]}
ROBOTS = ["panda_wristcam", "panda_stick", "fetch", "xarm7_ability", "floating_panda_gripper"]


@pytest.fixture(scope="module")
def kinematics():
    """ManiSkill's own kinematics of each robot that ships with it and has an end-effector controller."""
    import mani_skill.envs  # noqa: F401  registers the tasks

    found = {}
    for robot in ROBOTS:
        env = gym.make("Empty-v1", robot_uids=robot, sim_backend="physx_cpu", render_backend="none").unwrapped
        env.agent.set_control_mode("pd_ee_delta_pose")
        solvers = [c.kinematics for c in env.agent.controller.controllers.values() if hasattr(c, "kinematics")]
        found[robot] = solvers[0]
    return found


@pytest.fixture
def no_library():
    """Forgets the compiled library before and after the test."""
    from envs.batched.kinematics import load_library

    load_library.cache_clear()
    yield
    load_library.cache_clear()


def make_solver(kinematics):
    from envs.batched.kinematics import RowSolver

    return RowSolver(kinematics)


def random_rows(solver, num_rows: int, reach: float, turn: float, spread: float = 1.5, home=None):
    """Start positions [N, D], and poses [N, 7] up to `reach` metres and `turn` rad away from those of the link."""
    rng = np.random.default_rng(0)
    qpos = rng.uniform(-spread, spread, (num_rows, solver.columns.max() + 1)).astype(np.float32)
    if home is not None:
        qpos[:, : len(home)] += np.float32(home)
    poses = np.empty((num_rows, 7), np.float32)
    for row in range(num_rows):
        solver.pmodel.compute_forward_kinematics(qpos[row, solver.columns])
        pose = solver.pmodel.get_link_pose(solver.link)
        w = rng.uniform(-turn, turn, 3)
        turned = sapien.Pose(q=[1, *w / 2] / np.sqrt(1 + w @ w / 4)) * sapien.Pose(q=pose.q)
        poses[row] = [*pose.p + rng.uniform(-reach, reach, 3), *turned.q]
    return qpos, poses


def by_sapien(solver, qpos: np.ndarray, poses: np.ndarray):
    """SAPIEN's joint values of the chain [N, joints], and whether each is a solution [N]."""
    chain = solver.chain.source[: solver.chain.num_joints]
    places = [solver.columns.tolist().index(source) for source in chain]
    results = [solver.by_sapien(q, pose) for q, pose in zip(qpos, poses, strict=True)]
    return np.array([values[places] for values, _ in results]), np.array([success for _, success in results])


def targets_of(solver, qpos: np.ndarray, poses: np.ndarray) -> np.ndarray:
    targets = np.full((len(qpos), len(solver.controlled)), 7, np.float32)
    solver.solve(range(len(qpos)), qpos, poses, targets)
    return targets


def assert_targets_equal_sapiens(solver, qpos: np.ndarray, poses: np.ndarray) -> np.ndarray:
    targets = targets_of(solver, qpos, poses)
    for row, (start, pose) in enumerate(zip(qpos, poses, strict=True)):
        result, success = solver.by_sapien(start, pose)
        expected = result[solver.controlled].astype(np.float32) if success else np.float32(7)
        assert (targets[row] == expected).all(), row
    return targets


@pytest.mark.parametrize("robot", ROBOTS)
@pytest.mark.parametrize(("reach", "turn"), [(0.1, 0.1), (0.3, 1.0)], ids=["posed", "far"])
def test_targets_are_sapiens_bit_for_bit(kinematics, robot: str, reach: float, turn: float) -> None:
    solver = make_solver(kinematics[robot])
    assert solver.chain is not None
    qpos, poses = random_rows(solver, 400, reach, turn)  # stretched arms, and poses out of reach, among them
    assert_targets_equal_sapiens(solver, qpos, poses)
    assert solver.num_by_sapien < 400 * (0.5 if turn < 1 else 0.9)


@pytest.mark.parametrize("robot", ROBOTS)
def test_margins_are_a_hundred_times_the_differences_and_success_agrees(kinematics, robot: str) -> None:
    from envs.batched.kinematics import FAILED, SOLVED

    solver = make_solver(kinematics[robot])
    qpos, poses = random_rows(solver, 400, 0.1, 0.1)
    values, margins, status = solver.run(range(400), qpos, poses, np.empty((400, len(solver.controlled)), np.float32))
    expected, success = by_sapien(solver, qpos, poses)
    assert success[status == SOLVED].all()
    assert not success[status == FAILED].any()
    solved = status == SOLVED
    assert solved.sum() > 200
    assert (np.abs(values - expected).max(1)[solved] <= margins[solved] / 100).all()
    assert margins[solved].max() < 1e-8


def test_a_value_at_the_border_of_two_float32_goes_to_sapien(kinematics) -> None:
    solver = make_solver(kinematics["panda_wristcam"])
    qpos, poses = random_rows(solver, 8, 0.0, 0.0, spread=0.0, home=HOME["panda_wristcam"])
    poses[:, 0] += np.linspace(0.01, 0.05, 8, dtype=np.float32)  # in the arm's plane: joints 1, 3 and 5 stay near zero
    assert_targets_equal_sapiens(solver, qpos, poses)
    assert solver.num_by_sapien == 8


def test_rows_that_are_not_numbers_stay_where_they_are_and_spoil_no_others(kinematics) -> None:
    solver = make_solver(kinematics["panda_wristcam"])
    qpos, poses = random_rows(solver, 24, 0.05, 0.05, spread=0.2, home=HOME["panda_wristcam"])
    clean = targets_of(solver, qpos, poses)
    qpos[3, 2], poses[10, 1], poses[17, 4] = np.nan, np.nan, np.inf
    targets = targets_of(solver, qpos, poses)
    assert (targets[[3, 10, 17]] == 7).all()
    others = np.setdiff1d(np.arange(24), [3, 10, 17])
    assert (targets[others] == clean[others]).all()


def test_a_continuous_joint_beyond_half_a_turn_comes_back_within_it(kinematics) -> None:
    solver = make_solver(kinematics["fetch"])
    qpos, poses = random_rows(solver, 100, 0.05, 0.05)
    wide = qpos.copy()
    continuous = [s for s, kind in zip(solver.chain.source, solver.chain.kind, strict=True) if kind == 1]
    assert continuous
    wide[:, continuous] += np.float32(4 * np.pi)
    targets = assert_targets_equal_sapiens(solver, wide, poses)
    slots = [solver.chain.slot[j] for j in range(solver.chain.num_joints) if solver.chain.kind[j] == 1]
    solved = (targets != 7).all(1)
    assert solved.sum() > 50
    assert np.abs(targets[np.ix_(solved, slots)]).max() <= np.float32(np.pi)
    assert solver.num_by_sapien < 50


def test_results_do_not_depend_on_the_instruction_set(kinematics, no_library, monkeypatch) -> None:
    from envs.batched import kinematics as module

    results = []
    for options in ([], module._instruction_set()):
        monkeypatch.setattr(module, "_instruction_set", lambda options=options: options)
        module.load_library.cache_clear()
        solver = make_solver(kinematics["panda_wristcam"])
        qpos, poses = random_rows(solver, 200, 0.2, 0.5)
        results.append(solver.run(range(200), qpos, poses, np.empty((200, 7), np.float32)))
    for plain, vectors in zip(*results, strict=True):
        assert (plain == vectors).all()


def test_without_a_compiler_sapien_solves_and_the_log_says_so_once(kinematics, no_library, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO, "envs.batched.kinematics"):
        solvers = [make_solver(kinematics["panda_wristcam"]) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "inverse kinematics row by row (slow): clik.c cannot be compiled or loaded: there is no C compiler "
        "no-such-compiler"
    ]
    qpos, poses = random_rows(solvers[0], 20, 0.1, 0.1)
    assert_targets_equal_sapiens(solvers[1], qpos, poses)
    assert solvers[1].num_by_sapien == 20


def test_a_chain_that_does_not_agree_with_sapien_is_left_to_it(kinematics, monkeypatch) -> None:
    from envs.batched import kinematics as module

    read = module.read_chain

    def misread(kinematics):
        chain = read(kinematics)
        chain.offset[3][1] += 1e-9
        return chain

    monkeypatch.setattr(module, "read_chain", misread)
    assert make_solver(kinematics["panda_wristcam"]).chain is None


@pytest.mark.parametrize("control", ["pd_ee_delta_pos", "pd_ee_target_delta_pose"])
def test_drive_targets_of_batched_rows_are_sapiens(control: str, monkeypatch) -> None:
    from envs.batched import kinematics as module
    from envs.batched.build import make_batched_task

    solved = []
    stock = module.RowSolver.solve

    def solve(solver, rows, qpos, poses, targets):
        expected = targets.copy()
        for row in rows:
            result, success = solver.by_sapien(qpos[row], poses[row])
            if success:
                expected[row] = result[solver.controlled]
        stock(solver, rows, qpos, poses, targets)
        assert (targets == expected).all()
        solved.append((len(rows), solver.num_by_sapien))

    monkeypatch.setattr(module.RowSolver, "solve", solve)
    env = make_batched_task("PickCube-v1", 4, False, control_mode=control)
    env.begin([0, 1, 2, 3], [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        env.advance(torch.rand(4, env.single_action_space.shape[0], generator=generator) * 2 - 1, [0, 1, 3])
    env.close()
    assert [rows for rows, _ in solved] == [3] * 20
    assert solved[-1][1] < 30
