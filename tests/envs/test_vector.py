"""The batched env in the place of gym.make: ManiSkill's wrappers around it, against stock envs bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_embodied.errors import ConfigError, SimulatorError

pytestmark = pytest.mark.sim

SMALL = {
    "sensor_configs": {"width": 16, "height": 16},
    "human_render_camera_configs": {"width": 32, "height": 32, "shader_pack": "minimal"},
}
STATE = {"obs_mode": "state", "render_backend": "none"}


def make(task: str = "PickCube-v1", num_envs: int = 2, **kwargs: object):
    from envs.vector import make as make_env

    torch.set_num_threads(1)
    return make_env(task, num_envs, **{**SMALL, **kwargs})


def make_stock(task: str, **kwargs: object):
    import mani_skill.envs  # noqa: F401  registers the tasks

    chosen = {**SMALL, "sim_backend": "physx_cpu", "render_backend": "cpu", "reconfiguration_freq": 0, **kwargs}
    return gym.make(task, num_envs=1, **chosen)


def as_vector(env, **kwargs: bool):
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    return ManiSkillVectorEnv(env, record_metrics=True, **kwargs)


def physics(env) -> list[bytes]:
    return [system.pack() for system in env.unwrapped.scene.px.systems]


def random_actions(env, seed: int) -> Tensor:
    dim = env.unwrapped.single_action_space.shape[0]
    return torch.rand(env.unwrapped.num_envs, dim, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def assert_row_equal(rows: object, row: int, stock: object, path: str) -> None:
    """Row `row` of nested tensors is row 0 of a stock env's; types count."""
    if isinstance(stock, dict):
        assert isinstance(rows, dict), path
        assert rows.keys() == stock.keys(), path
        for key, value in stock.items():
            assert_row_equal(rows[key], row, value, f"{path}/{key}")
    elif isinstance(stock, Tensor):
        assert isinstance(rows, Tensor), path
        assert rows.dtype == stock.dtype, path
        assert torch.equal(rows[row], stock[0]), path
    else:
        assert rows == stock, path


class FreshStock(gym.Wrapper):
    """A stock env that is built anew for every episode, as stock keeps history; `next_seed()` is its seed."""

    def __init__(self, build: Callable[[], gym.Env], next_seed: Callable[[], int]) -> None:
        self._build, self._next_seed = build, next_seed
        super().__init__(build())
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        self.env.close()
        self.env = self._build()
        self.episodes += 1
        return self.env.reset(seed=int(self._next_seed()))


def test_episodes_with_autoreset_equal_those_of_stock_envs() -> None:
    from envs.tasks import TaskView, push_cube

    kwargs = {**STATE, "control_mode": "pd_ee_delta_pose", "max_episode_steps": 15}
    batched = as_vector(make("PushCube-v1", 3, **kwargs))
    seeds_of = batched.base_env
    stock = [
        as_vector(
            FreshStock(lambda: make_stock("PushCube-v1", **kwargs), lambda row=row: seeds_of._row_seeds[row]),
        )
        for row in range(3)
    ]
    seen, info = batched.reset(seed=[1, 2, 3])
    for row, env in enumerate(stock):
        stock_seen, stock_info = env.reset()
        assert_row_equal(seen, row, stock_seen, "obs")
        assert_row_equal(info, row, stock_info, "info")
    view, ends, seeds = TaskView(batched.base_env, True), set(), set(batched.base_env._row_seeds)
    for step in range(31):
        actions = push_cube(view)
        actions[1] = 0.0  # this row runs into the time limit
        seen, reward, terminated, truncated, info = batched.step(actions)
        for row, env in enumerate(stock):
            stock_seen, stock_reward, stock_terminated, stock_truncated, stock_info = env.step(actions[row : row + 1])
            assert_row_equal(seen, row, stock_seen, f"{step}: obs")
            assert_row_equal(reward, row, stock_reward, f"{step}: reward")
            assert_row_equal(terminated, row, stock_terminated, f"{step}: terminated")
            assert_row_equal(truncated, row, stock_truncated, f"{step}: truncated")
            assert_info_equal(info, row, stock_info, step)
        if "_final_info" in info:
            ends |= {(step, row) for row in info["_final_info"].nonzero()[:, 0].tolist()}
            seeds |= set(batched.base_env._row_seeds)
    assert min(env._env.episodes for env in stock) >= 3  # that of the first reset and two by autoreset
    assert len(seeds) == 3 + len(ends)
    assert len({step for step, _ in ends}) > 2  # pushed cubes end their episodes early
    for env in [batched, *stock]:
        env.close()


def assert_info_equal(info: dict, row: int, stock_info: dict, step: int) -> None:
    finished = "final_info" in stock_info
    assert bool("_final_info" in info and info["_final_info"][row]) == finished
    assert bool("_final_observation" in info and info["_final_observation"][row]) == finished
    if finished:
        for name in ("final_observation", "final_info"):
            assert_row_equal(info[name], row, stock_info[name], f"{step}: {name}")
        assert {"success_once", "return", "episode_len", "reward"} <= stock_info["final_info"]["episode"].keys()
    for key in ("elapsed_steps", "success", *(["episode"] if "final_info" not in info else [])):
        assert_row_equal(info[key], row, stock_info[key], f"{step}: {key}")


def test_observations_and_images_of_every_kind_equal_those_of_stock_envs() -> None:
    kwargs = {"obs_mode": "rgb+depth+segmentation+state", "render_mode": "rgb_array"}
    batched, stock = make("StackCube-v1", 2, **kwargs), make_stock("StackCube-v1", **kwargs)
    assert_row_equal(batched.reset(seed=[4, 5])[0], 1, stock.reset(seed=5)[0], "obs")
    actions = random_actions(batched, 0)
    seen, shown = batched.step(actions)[0], batched.render()
    assert_row_equal(seen, 1, stock.step(actions[1:])[0], "obs")
    assert_row_equal(shown, 1, stock.render(), "render")
    assert set(seen["sensor_data"]["hand_camera"]) == {"rgb", "depth", "segmentation"}
    assert (shown[0] != shown[1]).any()
    spaces = batched.unwrapped
    assert spaces.observation_space.contains(to_numpy(seen))
    assert spaces.single_observation_space.contains(to_numpy(torch.utils._pytree.tree_map(lambda v: v[0], seen)))
    for env in (batched, stock):
        env.close()


def to_numpy(seen: object) -> object:
    return torch.utils._pytree.tree_map(lambda value: value.numpy(), seen)


def test_images_that_an_observation_does_not_read_do_no_harm() -> None:
    env = make(obs_mode="normal")  # ManiSkill's default shaders give none
    for seed in range(3):
        env.reset(seed=seed)
    env.close()


def test_rebuilding_at_every_reset_gives_newly_built_rows() -> None:
    kwargs = {**STATE, "reconfiguration_freq": 1}
    batched = make("PegInsertionSide-v1", 2, **kwargs)
    radii = []
    for seed in ([4, 5], None):
        seen, info = batched.reset(seed=seed)
        assert info["reconfigure"]
        radii.append(batched.unwrapped.peg_half_sizes[:, 1].clone())
        stock = make_stock("PegInsertionSide-v1", **kwargs)
        assert_row_equal(seen, 1, stock.reset(seed=batched.unwrapped._row_seeds.tolist()[1])[0], "obs")
        stock.close()
    assert len(torch.cat(radii).unique()) == 4
    with pytest.raises(SimulatorError, match=r"envs 1 would rebuild all 2.*reconfiguration_freq=0"):
        batched.reset(options={"env_idx": torch.tensor([1])})
    batched.close()


def test_seeds_that_are_drawn_are_maniskills_and_do_not_depend_on_other_rows() -> None:
    env = make(**STATE).unwrapped
    stock = make_stock("PickCube-v1", **STATE, enhanced_determinism=True).unwrapped
    drawn = []
    for _ in range(2):
        env.reset(seed=[7, 8])
        stock.reset(seed=8)
        for k in range(3):
            if k == 1:
                env.reset(options={"env_idx": torch.tensor([0])})
            env.reset(options={"env_idx": torch.tensor([False, True])})
            stock.reset()
            assert env._row_seeds[1] == stock._episode_seed[0]
            drawn.append(env._row_seeds[1])
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3
    env.reset(seed=5)
    many = make_seeds_like_maniskill(5, 2)
    assert env._row_seeds.tolist() == many
    for env_ in (env, stock):
        env_.close()


def make_seeds_like_maniskill(seed: int, num_envs: int) -> list[int]:
    return [seed, *np.random.RandomState(seed).randint(2**31, size=num_envs - 1).tolist()]


def test_a_reset_of_some_rows_leaves_the_others_and_the_global_generators_alone() -> None:
    env = make(num_envs=3, **STATE)
    env.reset(seed=1)
    env.step(random_actions(env, 0))
    before, generators = physics(env), (torch.get_rng_state(), np.random.get_state()[1].copy())
    _, info = env.reset(options={"env_idx": torch.tensor([1])})
    after = physics(env)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert info["elapsed_steps"].tolist() == [1, 0, 1]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (np.random.get_state()[1] == generators[1]).all()
    env.close()


def test_a_state_can_be_given_to_some_rows() -> None:
    env = make(**STATE)
    env.reset(seed=1)
    for k in range(3):
        seen = env.step(random_actions(env, k))[0]
    state = torch.utils._pytree.tree_map(lambda value: value[:1].clone(), env.unwrapped.get_state_dict())
    options = {"env_idx": torch.tensor([1]), "reset_to_env_states": {"env_states": state}}
    moved, _ = env.reset(options=options)
    assert torch.equal(moved[0], seen[0])
    assert torch.allclose(moved[1], moved[0], atol=1e-5)
    shown = torch.full((1, seen.shape[1]), 3.0)
    given, _ = env.reset(options={**options, "reset_to_env_states": {"env_states": state, "obs": shown}})
    assert torch.equal(given[1:], shown)
    assert torch.equal(given[0], seen[0])
    env.close()


def test_robots_are_driven_by_name_or_by_one_flat_action() -> None:
    from mani_skill.utils.wrappers.flatten import FlattenActionSpaceWrapper

    kwargs = {**STATE, "control_mode": "pd_joint_delta_pos"}
    batched = FlattenActionSpaceWrapper(make("TwoRobotPickCube-v1", 2, **kwargs))
    stock = [FlattenActionSpaceWrapper(make_stock("TwoRobotPickCube-v1", **kwargs)) for _ in range(2)]
    batched.reset(seed=[1, 2])
    actions = torch.rand(2, batched.single_action_space.shape[0], generator=torch.Generator().manual_seed(0)) - 0.5
    seen = batched.step(actions)[0]
    for row, env in enumerate(stock):
        env.reset(seed=1 + row)
        assert_row_equal(seen, row, env.step(actions[row : row + 1])[0], "obs")
    with pytest.raises(SimulatorError, match="the robots are panda_wristcam-0, panda_wristcam-1: give one for each"):
        batched.unwrapped.step({"panda_wristcam-0": torch.zeros(2, 8)})
    for env in [batched, *stock]:
        env.close()


def test_the_control_mode_can_be_switched_while_it_runs() -> None:
    batched, stock = make(**STATE, control_mode="pd_joint_delta_pos"), []
    batched.reset(seed=[1, 2])
    for row in range(2):
        stock.append(make_stock("PickCube-v1", **STATE, control_mode="pd_joint_delta_pos"))
        stock[-1].reset(seed=1 + row)
    for step, (mode, dim) in enumerate([("pd_ee_target_delta_pose", 7), ("pd_ee_target_delta_pose", 7)]):
        actions = torch.rand(2, dim, generator=torch.Generator().manual_seed(step)) - 0.5
        seen = batched.step({"control_mode": mode, "action": actions})[0]
        for row, env in enumerate(stock):
            expected = env.step({"control_mode": mode, "action": actions[row : row + 1]})[0]
            assert_row_equal(seen, row, expected, f"{step}: obs")
    with pytest.raises(SimulatorError, match=r"shape \(2, 8\), but \(2, 7\)"):
        batched.step({"control_mode": mode, "action": torch.zeros(2, 8)})
    for env in [batched, *stock]:
        env.close()


def test_the_time_limit_is_found_and_a_step_before_the_first_reset_refused() -> None:
    from mani_skill.utils.gym_utils import find_max_episode_steps_value

    env = make(**STATE)
    assert find_max_episode_steps_value(env) == env.spec.max_episode_steps == 50
    with pytest.raises(gym.error.ResetNeeded):
        env.step(env.action_space.sample())
    env.close()


def test_one_row_takes_actions_without_a_leading_axis() -> None:
    env = make(num_envs=1, **STATE)
    env.reset(seed=1)
    flat = env.step(np.full(8, 0.5))[0]
    env.reset(seed=1)
    assert torch.equal(flat, env.step(torch.full((1, 8), 0.5))[0])
    env.close()


def test_threads_give_the_same_physics() -> None:
    several = [make(num_envs=3, num_threads=count, **STATE) for count in (1, 2)]
    for env in several:
        env.reset(seed=1)
        for k in range(3):
            env.step(random_actions(env, k))
    assert physics(several[0]) == physics(several[1])
    for env in several:
        env.close()


def test_bad_actions_and_seeds_are_refused_and_leave_everything_as_it_was() -> None:
    env, twin = make(num_envs=3, **STATE), make(num_envs=3, **STATE)
    for env_ in (env, twin):
        env_.reset(seed=1)
        env_.step(random_actions(env_, 0))
    bad = random_actions(env, 1)
    bad[0, 3], bad[2, 0] = float("nan"), float("inf")
    with pytest.raises(SimulatorError, match="actions of rows 0, 2 are not finite: nothing was stepped"):
        env.step(bad)
    with pytest.raises(SimulatorError, match=r"shape \(3, 7\), but \(3, 8\) \(rows, dimensions\)"):
        env.step(torch.zeros(3, 7))
    with pytest.raises(SimulatorError, match=r"shape \(8,\), but \(3, 8\)"):
        env.step(np.zeros(8))
    with pytest.raises(SimulatorError, match="the robots are none: the task has one robot"):
        env.step({"panda-0": torch.zeros(3, 8)})
    for seed, rows, message in (
        ([1, 2], None, "2 seeds for 3 envs: give one seed, or one per env"),
        (-1, None, r"from 0 to 2\*\*32"),
        (0.5, None, "whole numbers"),
        (None, [3], r"rows \[3\]: each must be one of 0\.\.2"),
        (None, [1, 1], r"rows \[1, 1\]: .* once"),
        (None, [], r"rows \[\]"),
    ):
        with pytest.raises(SimulatorError, match=message):
            env.reset(seed=seed, options=None if rows is None else {"env_idx": torch.tensor(rows, dtype=torch.long)})
    results = [env_.step(random_actions(env_, 2)) for env_ in (env, twin)]
    assert torch.equal(results[0][0], results[1][0])
    assert physics(env) == physics(twin)
    assert [env_.reset()[1]["elapsed_steps"].tolist() for env_ in (env, twin)] == [[0, 0, 0]] * 2
    assert physics(env) == physics(twin)  # refused seeds were not drawn either
    for env_ in (env, twin):
        env_.close()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"num_envs": 0}, ConfigError, "num_envs is 0, but an env has at least one row"),
        ({"num_envs": -2}, ConfigError, "num_envs is -2"),
        ({"num_envs": 1.5}, ConfigError, r"num_envs is 1\.5"),
        ({"task": "PickCub-v1"}, ConfigError, "did you mean PickCube-v1"),
        ({"sim_backend": "physx_cuda"}, ConfigError, "leave it out, use one of auto, cpu, physx_cpu, or gym.make"),
        ({"render_mode": "human"}, ConfigError, "use 'rgb_array'"),
        ({"control_mode": "telepathy"}, ConfigError, "control_mode is telepathy not in supported modes"),
        ({"obs_mode": "smell"}, SimulatorError, "cannot be built with .*Invalid texture type 'smell'"),
        ({"colour": 3}, SimulatorError, "unexpected keyword argument 'colour'"),
        ({"task": "PutCarrotOnPlateInScene-v1"}, SimulatorError, "run `python -m mani_skill.utils.download_asset Put"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_way_out(
    kwargs: dict, error: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error, match=message):
        make(**kwargs)
    assert "batched CPU backend" not in caplog.text  # stock envs are no help, so nothing was said of them
