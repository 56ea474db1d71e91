"""One contract for every env: point_reach, ManiSkill on the batched CPU backend, its stock envs, the env of the docs.

For a custom env alone: `python -m pytest tests/envs/test_env_contract.py --env=<yaml>` (docs/own_env.md).  What
an env does not offer is skipped, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from envs import point_reach
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import RlinfError, SimulatorError
from rlinf_embodied.interfaces.envs import ChunkResult, FeatureKind, Observation, RunningEpisode, VectorEnv
from rlinf_embodied.plug_ins import load_target
from tests.observations import pixels

N, CHUNK = 3, 5
POINT = EnvConfig(
    task="PointReach-v0", num_envs=N, block_size=N, horizon=10, obs_size=16, cameras=["a", "b"], hold_steps=1
)
PICK = EnvConfig(
    num_envs=N,
    block_size=N,
    horizon=30,
    obs_size=16,
    cameras=["base_camera", "hand_camera"],
    options={"robot": "panda_wristcam", "camera_fov": 0.8},
    hold_steps=1,
)
CONFIGS = {
    "point_reach": POINT,
    "batched": replace(PICK, options=PICK.options | {"backend": "batched"}),
    "stock": replace(PICK, options=PICK.options | {"backend": "stock"}),
    "gymnasium": EnvConfig(
        _target_="envs.gym.env.make_env",
        task="HalfCheetah-v5",
        num_envs=N,
        block_size=N,
        horizon=10,
        cameras=[],
        hold_steps=0,
    ),
}
EXAMPLE = Path(__file__).resolve().parents[2] / "experiments/examples/own_env.yaml"
DOT = EnvConfig(  # an image and nothing else, and no episode ends by itself
    _target_="envs.gym.env.make_env",
    task="gym_envs:Dot-v0",
    num_envs=N,
    block_size=N,
    horizon=10,
    obs_size=16,
    cameras=["rgb_array"],
    hold_steps=0,
    options={"history_free": True},
)
CONFIGS |= {"dot": DOT, "history": replace(POINT, history=3)}
TWO_VIEWS = Path(__file__).resolve().parents[1] / "two_views.yaml"  # cameras of two sizes, two state vectors
HANDOVER = Path(__file__).with_name("handover.yaml")  # all that tells its starts apart is the picture
SIM = pytest.mark.sim
KINDS = [
    "point_reach",
    "gymnasium",
    "dot",
    "history",
    pytest.param("batched", marks=SIM),
    pytest.param(str(EXAMPLE), id="own_env"),
    pytest.param(str(HANDOVER), id="handover"),
    pytest.param(str(TWO_VIEWS), id="two_views"),
]
STOCK = pytest.param("stock", marks=SIM)


# stock envs share `EpisodeEnv` with the batched ones: only the tests of what their own simulator does
ON_STOCK = {
    "test_an_env_is_a_vector_env_with_the_shapes_of_its_spec",
    "test_an_episode_is_a_function_of_seed_and_actions_whatever_ran_before",
    "test_a_partial_reset_leaves_running_rows_alone",
    "test_recorded_rows_give_one_image_per_env_step_and_films_change_nothing",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test on every env, or on that of --env alone."""
    own = metafunc.config.getoption("--env")
    if "name" in metafunc.fixturenames:
        if own is not None:
            require_own(own)
        ours = [*KINDS, *([STOCK] if metafunc.function.__name__ in ON_STOCK else [])]
        kinds = ours if own is None else [pytest.param(own, id=Path(own).stem)]
        metafunc.parametrize("name", kinds, indirect=True, scope="module")


@cache
def own_section(path: str) -> EnvConfig:
    """Returns the section in a file, with short episodes of few rows."""
    if path == str(EXAMPLE):
        sys.path.append(str(EXAMPLE.parent))
    env = compose_evaluate([f"env={path}", "policy=random"]).env
    return replace(
        env, num_envs=N, block_size=N, chunk=CHUNK, horizon=10, chunks_per_rollout=2, obs_size=16, hold_steps=1
    )


@cache
def require_own(path: str) -> None:
    """Ends the tests with one message where the section in a file cannot be read, or its env not be built."""
    try:
        build(path).close()
    except RlinfError as error:
        pytest.exit(f"--env={path}: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


def own_horizon(path: str) -> int:
    """Returns how long the episodes of the section in a file are, in whole chunks."""
    return compose_evaluate([f"env={path}", "policy=random"]).env.horizon // CHUNK * CHUNK


def build(name: str, num_envs: int = N, render_final: bool = False, **changes: object) -> VectorEnv:
    config = replace(CONFIGS.get(name) or own_section(name), **changes)
    if name in ("point_reach", "history"):
        return point_reach.make_env(config, num_envs, render_final=render_final)
    return cast(VectorEnv, load_target(config._target_)(config, num_envs, "cpu", render_final))


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def env(name: str) -> Iterator[VectorEnv]:
    """One env for all tests of its kind: a test that depends on what ran before it has found a fault."""
    made = build(name, render_final=True)
    yield made
    made.close()


def random_actions(env: VectorEnv, seed: int) -> Tensor:
    drawn = torch.rand(env.spec.num_envs, CHUNK, env.spec.action_dim, generator=torch.Generator().manual_seed(seed))
    return drawn * 2 - 1


def still(env: VectorEnv) -> Tensor:
    return torch.zeros(N, CHUNK, env.spec.action_dim)


def expert(env: VectorEnv) -> Callable[[int], Tensor]:
    """Returns the scripted expert; the test is skipped where there is none."""
    env.reset(range(env.spec.num_envs))
    try:
        env.expert_actions()
    except SimulatorError as error:
        pytest.skip(str(error))
    return lambda _: env.expert_actions()


def something(env: VectorEnv, seed: int) -> Tensor | Callable[[int], Tensor]:
    """Returns the expert where there is one, for it touches more of the simulator, or random actions."""
    try:
        env.expert_actions()
    except SimulatorError:
        return random_actions(env, seed)
    return lambda _: env.expert_actions()


def require_cameras(env: VectorEnv) -> None:
    if not env.spec.cameras:
        pytest.skip("env.cameras is []: there are no images")


def why_not_replayed(env: VectorEnv) -> str:
    """Returns why nobody promises that an episode repeats itself, "" if it does; one row is reset."""
    nothing_done = RunningEpisode(0, torch.zeros(0, env.spec.action_dim))
    try:
        env.restore([nothing_done, *[None] * (env.spec.num_envs - 1)])
    except SimulatorError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def repeats(env: VectorEnv) -> None:
    """Skips tests that run an episode twice where nobody promises that it is the same one."""
    if reason := why_not_replayed(env):
        pytest.skip(reason)


def to_the_horizon(env: VectorEnv, next_seeds: list[int] | None = None) -> list[ChunkResult]:
    """Returns the chunks of whole episodes in which nothing is done."""
    results = [env.step_chunk(still(env), next_seeds) for _ in range(env.spec.chunks_per_episode)]
    if any(result.terminated.any() for result in results):
        pytest.skip("episodes end by themselves although nothing is done")
    return results


def same_observation(left: Observation, right: Observation) -> bool:
    assert list(left.images) == list(right.images)
    assert left.privileged is not None
    assert right.privileged is not None
    return (
        torch.equal(left.proprio, right.proprio)
        and torch.equal(left.privileged, right.privileged)
        and all(torch.equal(shown, right.images[name]) for name, shown in left.images.items())
        and left.instruction == right.instruction
    )


def same_result(left: ChunkResult, right: ChunkResult) -> bool:
    names = ("rewards", "terminated", "truncated", "valid", "success", "privileged")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names) and same_observation(
        left.observation, right.observation
    )


def test_an_env_is_a_vector_env_with_the_shapes_of_its_spec(name: str, env: VectorEnv) -> None:
    assert isinstance(env, VectorEnv)
    spec = env.spec
    seen = env.reset(range(N))
    result = env.step_chunk(random_actions(env, 0))
    shown = {FeatureKind.image: seen.images, FeatureKind.state: seen.state}
    for kind, tensors in shown.items():
        assert list(tensors) == [feature.name for feature in spec.of_kind(kind)]
        for feature in spec.of_kind(kind):
            assert tuple(tensors[feature.name].shape) == (N, *feature.shape)
            assert tensors[feature.name].dtype == getattr(torch, feature.dtype)
    assert result.rewards.dtype == torch.float32
    assert result.privileged is not None
    assert result.privileged.shape == (N, CHUNK, spec.privileged_dim)
    assert result.rewards.shape == result.valid.shape == result.success.shape == (N, CHUNK)
    assert all(seen.instruction)
    if name in CONFIGS:  # these have one task; of a suite each row has its own
        assert len(set(seen.instruction)) == 1
    assert (spec.num_envs, spec.chunk) == (N, CHUNK)


def test_what_repeats_nothing_is_not_asked_to() -> None:
    wears = build(str(HANDOVER), options={"make": {"wears": True}, "history_free": False})
    assert "not known to be a function of seed and actions" in why_not_replayed(wears)
    assert not why_not_replayed(build(str(HANDOVER)))


def test_images_change_when_the_state_does(env: VectorEnv) -> None:
    require_cameras(env)
    before = pixels(env.reset(range(N)))
    after = pixels(env.step_chunk(torch.ones(N, CHUNK, env.spec.action_dim)).observation)
    assert before is not None
    assert after is not None
    assert (before != after).flatten(1).any(1).all()
    assert before.float().std() > 1


@pytest.mark.usefixtures("repeats")
def test_an_episode_is_a_function_of_seed_and_actions_whatever_ran_before(env: VectorEnv) -> None:
    first = env.reset([5, 6, 7])
    a = [env.step_chunk(random_actions(env, k)) for k in range(2)]
    env.reset([90, 91, 92])
    for k in range(2):
        env.step_chunk(something(env, k), next_seeds=[100 + k, 110 + k, 120 + k])
    assert same_observation(first, env.reset([5, 6, 7]))
    b = [env.step_chunk(random_actions(env, k)) for k in range(2)]
    assert all(same_result(left, right) for left, right in zip(a, b, strict=True))


def test_other_seeds_and_other_actions_give_other_episodes(name: str, env: VectorEnv) -> None:
    first = env.reset([5, 6, 7])
    result = env.step_chunk(random_actions(env, 1))
    other = env.reset([8, 9, 10])
    assert not same_observation(first, other)
    env.reset([5, 6, 7])
    changed = env.step_chunk(random_actions(env, 2))
    assert not same_result(result, changed)
    # of others only the picture may tell it, and rewards come late
    if name != "dot" and (name in CONFIGS or name == str(EXAMPLE)):
        assert name not in CONFIGS or not torch.equal(first.proprio, other.proprio)  # others' robots may start alike
        assert first.privileged is not None
        assert other.privileged is not None
        assert not torch.equal(first.privileged, other.privileged)
        assert not torch.equal(result.rewards, changed.rewards)


@pytest.mark.usefixtures("repeats")
def test_a_row_does_not_depend_on_its_place_its_neighbours_or_their_number(name: str, env: VectorEnv) -> None:
    alone = build(name, num_envs=1)
    small = alone.reset([6])
    actions = random_actions(env, 3)
    lone = [alone.step_chunk(actions[1:2]) for _ in range(2)]
    alone.close()
    many = env.reset([30, 6, 31])
    crowd = [env.step_chunk(actions) for _ in range(2)]
    assert same_observation(small, many.rows([1]))
    for one, all_rows in zip(lone, crowd, strict=True):
        assert torch.equal(one.rewards[0], all_rows.rewards[1])
        assert same_observation(one.observation, all_rows.observation.rows([1]))


@pytest.mark.usefixtures("repeats")
def test_a_partial_reset_leaves_running_rows_alone(env: VectorEnv) -> None:
    env.reset([1, 2, 3])
    env.step_chunk(random_actions(env, 0))
    a = env.step_chunk(random_actions(env, 1))
    env.reset([1, 2, 3])
    env.step_chunk(random_actions(env, 0))
    seen = env.reset([77], rows=[1])
    b = env.step_chunk(random_actions(env, 1))
    assert torch.equal(a.rewards[[0, 2]], b.rewards[[0, 2]])
    assert same_observation(a.observation.rows([0, 2]), b.observation.rows([0, 2]))
    same_rewards = torch.equal(a.rewards[1], b.rewards[1])  # as where nothing is paid before the end
    assert not (same_rewards and same_observation(a.observation.rows([1]), b.observation.rows([1])))
    assert len(seen) == N


def test_without_next_seeds_rows_freeze_at_the_horizon_and_are_not_valid_any_more(env: VectorEnv) -> None:
    env.reset(range(N))
    results = to_the_horizon(env)
    last = results[-1]
    assert all(result.final_rows == () and result.valid.all() for result in results[:-1])
    assert last.final_rows == (0, 1, 2)
    assert last.truncated[:, -1].all()
    assert not last.truncated[:, :-1].any()
    assert not last.terminated.any()
    assert [end.metrics["episode_len"] for end in last.episodes] == [env.spec.horizon] * N
    assert env.running() == [None] * N
    frozen = env.step_chunk(random_actions(env, 0))
    assert not frozen.valid.any()
    assert frozen.rewards.abs().sum() == 0
    assert frozen.privileged is not None
    assert frozen.privileged.abs().sum() == 0
    assert torch.equal(frozen.observation.proprio, last.observation.proprio)
    assert not frozen.observation.images or pixels(frozen.observation).sum() == 0
    assert frozen.final_rows == ()
    assert frozen.episodes == ()


def test_a_solved_episode_terminates_and_its_later_sub_steps_are_not_valid(name: str, env: VectorEnv) -> None:
    act = expert(env)
    if name not in CONFIGS:  # its own episodes: few experts are done after ten steps
        env = build(name, render_final=True, horizon=own_horizon(name))
        act = expert(env)
    env.reset([0, 1, 2])
    ends = {}
    for _ in range(env.spec.chunks_per_episode):
        result = env.step_chunk(act)
        for end in result.episodes:
            ends[end.row] = (end, result)
    assert len(ends) == N
    solved = {row: pair for row, pair in ends.items() if pair[0].metrics["success_once"]}
    assert solved
    for row, (end, result) in solved.items():
        k = int(result.terminated[row].nonzero()[0])
        assert result.success[row, k]
        assert result.valid[row].tolist() == [True] * (k + 1) + [False] * (CHUNK - k - 1)
        assert result.rewards[row, k] > 0.9  # the bonus of 1 and what the shaped reward changed
        assert result.rewards[row, k + 1 :].abs().sum() == 0
        assert end.metrics["success_at_end"] == 1.0
        assert end.metrics["episode_len"] % CHUNK == (k + 1) % CHUNK
        assert end.metrics["reward"] == pytest.approx(end.metrics["return"] / end.metrics["episode_len"])
        assert result.final_observation is not None
        final = result.final_observation.rows([result.final_rows.index(row)])
        assert not final.images or pixels(final).float().std() > 1


@pytest.mark.usefixtures("repeats")
def test_next_seeds_start_the_next_episode_at_the_end_of_the_chunk(env: VectorEnv) -> None:
    fresh = env.reset([40, 41, 42])
    env.reset(range(N))
    result = to_the_horizon(env, [40, 41, 42])[-1]
    assert result.final_rows == (0, 1, 2)
    assert result.final_observation is not None
    assert not same_observation(result.final_observation, fresh)
    assert same_observation(result.observation, fresh)
    assert [(end.row, end.seed) for end in result.episodes] == [(0, 0), (1, 1), (2, 2)]
    assert [episode is not None and episode.seed for episode in env.running()] == [40, 41, 42]
    assert env.step_chunk(still(env)).valid.all()


@pytest.mark.usefixtures("repeats")
def test_a_running_episode_is_restored_bit_for_bit_in_another_env(name: str, env: VectorEnv) -> None:
    chunks = 3 if env.spec.horizon == PICK.horizon else 1  # a grasp begins in the third chunk of PickCube
    env.reset([0, 1, 2])
    for _ in range(chunks):
        env.step_chunk(something(env, 5))
    snapshot = env.running()
    assert any(episode is not None for episode in snapshot)
    here = env.step_chunk(random_actions(env, 9) * 0.2)
    other = build(name, render_final=True)
    other.reset([50, 51, 52])
    other.step_chunk(random_actions(env, 4))
    other.restore(snapshot)
    assert [e and (e.seed, e.actions.tolist()) for e in other.running()] == [
        e and (e.seed, e.actions.tolist()) for e in snapshot
    ]
    there = other.step_chunk(random_actions(env, 9) * 0.2)
    other.close()
    assert torch.equal(here.rewards, there.rewards)
    assert torch.equal(here.valid, there.valid)
    rows = [row for row, episode in enumerate(snapshot) if episode is not None]
    assert same_observation(here.observation.rows(rows), there.observation.rows(rows))
    assert [end.metrics for end in here.episodes] == [end.metrics for end in there.episodes]


def test_actions_of_the_wrong_shape_or_not_finite_are_refused_and_step_nothing(env: VectorEnv) -> None:
    env.reset([1, 2, 3])
    ended = env.step_chunk(random_actions(env, 0)).final_rows
    before = env.running()
    with pytest.raises(SimulatorError, match=r"shape \(3, 4, "):
        env.step_chunk(random_actions(env, 0)[:, :4])
    bad = random_actions(env, 0)
    bad[1, 2, 0] = torch.nan
    with pytest.raises(SimulatorError, match="rows 1 are not finite"):
        env.step_chunk(bad)
    with pytest.raises(SimulatorError, match="next_seeds has 2 entries for 3 rows"):
        env.step_chunk(random_actions(env, 0), next_seeds=[1, 2])
    with pytest.raises(SimulatorError, match="2 seeds for 1 rows"):
        env.reset([1, 2], rows=[0])
    with pytest.raises(SimulatorError, match="each must be one of"):
        env.reset([1], rows=[3])
    after = env.running()
    assert any(before), "every episode ends within five random actions: let them last longer"
    lengths = [0 if row in ended else CHUNK for row in range(N)]
    assert [len(e.actions) if e else 0 for e in after] == [len(e.actions) if e else 0 for e in before] == lengths


@pytest.mark.usefixtures("repeats")
def test_recorded_rows_give_one_image_per_env_step_and_films_change_nothing(env: VectorEnv) -> None:
    env.reset([1, 2, 3])
    plain = [env.step_chunk(random_actions(env, k)) for k in range(2)]
    env.reset([1, 2, 3])
    env.record([0, 2], size=48)
    filmed = [env.step_chunk(random_actions(env, k)) for k in range(2)]
    frames = env.take_frames()
    env.record([])
    if not frames:
        pytest.skip("the env cannot be filmed")
    assert all(same_result(left, right) for left, right in zip(plain, filmed, strict=True))
    assert sorted(frames) == [0, 2]
    assert {tuple(image.shape) for row in frames.values() for image in row} == {(48, 48, 3)}
    assert {row: len(images) for row, images in frames.items()} == {
        row: sum(int(result.valid[row].sum()) for result in filmed) for row in (0, 2)
    }
    assert frames[0][0].float().std() > 1
    assert not torch.equal(frames[0][0], frames[0][-1])
    env.step_chunk(random_actions(env, 3))
    assert env.take_frames() == {}


@pytest.mark.parametrize("reward", [Reward.dense, Reward.dense_delta, Reward.sparse])
def test_the_shaped_rewards_of_an_episode_add_up(name: str, reward: Reward) -> None:
    env = build(name, num_envs=1, reward=reward, hold_steps=0, success_bonus=2.0, bonus_at_timeout=True)
    act = something(env, 3)
    env.reset([1])
    results = [env.step_chunk(act) for _ in range(env.spec.chunks_per_episode)]
    env.close()
    total = float(torch.cat([result.rewards for result in results], 1).sum())
    (end,) = results[-1].episodes
    bonus = 2.0 * end.metrics.get("success_at_end", 0.0)
    assert end.metrics["episode_len"] == sum(int(result.valid.sum()) for result in results)
    solved = name in CONFIGS and env.spec.has_success
    if solved:
        assert end.metrics["success_once"] == 1.0
    if reward is Reward.sparse:
        assert total == bonus
    elif reward is Reward.dense:
        assert total == pytest.approx(end.metrics["return"] + bonus, rel=1e-4)
    elif solved:  # the change since the initial state: less than 1, and most of it for a task that is solved
        assert bonus + 0.2 < total < bonus + 1
