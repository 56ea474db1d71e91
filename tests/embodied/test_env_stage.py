"""The simulator as a stage: seeds by group, blocks that show nothing, steps that count, and what its report says."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from runs import GRPO, metric_rows, tiny, train

from envs.point_reach import PointSimulator
from rlinf_embodied.algorithms.batch import EnvColumns, RolloutReport
from rlinf_embodied.embodied.env_stage import CARRY_OVER, EnvStage, EnvStageConfig
from rlinf_embodied.embodied.warm_start import NewPolicyConfig, NewPolicyStage
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import ChunkResult, EpisodeEnd, Observation
from rlinf_embodied.runtime.host import StepContext, solo_context
from tests.observations import env_spec, observed, stacked


def stage_for(*overrides: str, group_size: int = 1, keep_images: bool = False, needs_success: bool = True) -> EnvStage:
    config = EnvStageConfig(
        *(tiny(*overrides).env, 3, group_size), needs_success=needs_success, keep_images=keep_images
    )
    stage = EnvStage(config)
    stage.setup(solo_context(range(4)))
    return stage


def chunk_towards_goal(observation: Observation | None) -> torch.Tensor | None:
    """The expert's chunk for a block of the toy, whose proprioception is (point, goal)."""
    if observation is None:
        return None
    offset = observation.proprio[:, 2:] - observation.proprio[:, :2]
    steps = [(offset / 0.15 - k).clamp(0, 1) + (offset / 0.15 + k).clamp(-1, 0) for k in range(4)]
    return torch.stack(steps, 1)


def roll(
    stage: EnvStage, step_context: StepContext, chunk_steps: int, idle: bool = False
) -> tuple[dict, RolloutReport, list[set]]:
    """Runs a rollout; returns columns, report, and the blocks that showed something before each chunk-step."""
    shown = stage.open(step_context, (0, 1, 2, 3))
    visible = []
    for step in range(chunk_steps):
        visible.append({block for block, observation in shown.items() if observation is not None})
        actions = {b: None if o is None else chunk_towards_goal(o) for b, o in shown.items()}
        if idle:
            actions = {b: None if a is None else torch.zeros_like(a) for b, a in actions.items()}
        shown = stage.step(StepContext(step_context.iteration, 0, step_context.round, step), actions)
    output = stage.close(step_context, dict.fromkeys(range(4)))
    assert isinstance(output.report, RolloutReport)
    return dict(output.blocks), output.report, visible


def starts(stage: EnvStage, step_context: StepContext) -> torch.Tensor:
    shown = stage.open(step_context, (0, 1, 2, 3))
    return torch.cat([o.proprio for o in shown.values() if o is not None])


def test_members_of_a_group_start_alike_and_groups_rounds_and_iterations_differ() -> None:
    stage = stage_for(*GRPO, group_size=4)
    proprio = starts(stage, StepContext(0))
    for group in range(4):
        assert bool((proprio[4 * group : 4 * group + 4] == proprio[4 * group]).all())
    seen = [proprio, starts(stage, StepContext(0, round=1)), starts(stage, StepContext(1))]
    leaders = torch.cat([each[::4] for each in seen])
    assert len(leaders.unique(dim=0)) == 12
    assert torch.equal(starts(stage, StepContext(0)), proprio)


def test_blocks_of_frozen_rows_show_nothing_and_columns_end_with_their_last_valid_step() -> None:
    stage = stage_for("env.auto_reset=false", "env.horizon=20", "env.chunks_per_rollout=5")
    columns, report, visible = roll(stage, StepContext(0), 5)
    assert visible[0] == {0, 1, 2, 3}
    assert all(later <= earlier for earlier, later in pairwise(visible))
    assert visible[-1] < visible[0]  # some block was solved early
    for block, column in columns.items():
        assert isinstance(column, EnvColumns)
        assert len(column.valid) == sum(block in blocks for blocks in visible)
        assert bool(column.valid.any((1, 2)).all())
        assert bool(column.success.all())
    assert len(report.episodes) == 16
    assert report.env_steps == sum(int(c.valid.sum()) for c in columns.values())
    assert report.env_steps == sum(int(e.metrics["episode_len"]) for e in report.episodes)


def test_with_partial_resets_every_row_continues_with_an_episode_of_its_own_seed() -> None:
    stage = stage_for("env.chunks_per_rollout=8")
    columns, report, visible = roll(stage, StepContext(0), 8)
    assert visible == [{0, 1, 2, 3}] * 8
    assert len(report.episodes) > 16
    assert len({(e.row, e.seed) for e in report.episodes}) == len(report.episodes)
    assert len({e.seed for e in report.episodes}) == len(report.episodes)
    ends = torch.cat([c.final_index[:, 0] for c in columns.values()])
    started = 16 + int((ends < 7).sum())  # each row begins one, and another one after each end but the last step's
    assert len(report.episodes) + report.num_cut == started
    for column in columns.values():
        ended = (column.terminated | column.truncated).any(-1).nonzero()
        assert torch.equal(ended, column.final_index)
        assert column.final is not None
        assert len(column.final) == len(column.final_index)
        assert not column.final.images  # the privileged critic needs none


def test_a_critic_that_sees_gets_images_of_final_and_last_states() -> None:
    columns, _, _ = roll(stage_for(keep_images=True), StepContext(0), 4, idle=True)
    for column in columns.values():
        assert column.final is not None
        assert bool((stacked(column.final).amax((1, 2, 3, 4)) > 0).all())


def test_groups_report_the_success_of_every_member() -> None:
    _, solved, _ = roll(stage_for(*GRPO, group_size=2), StepContext(0), 3)
    assert sorted(solved.group_outcomes) == list(range(8))
    by_env = {e.row: e.metrics["success_once"] > 0 for e in solved.episodes}
    for group, members in solved.group_outcomes.items():
        assert members == (by_env[2 * group], by_env[2 * group + 1])
    _, lazy, _ = roll(stage_for(*GRPO, group_size=2), StepContext(0), 3, idle=True)
    assert sum(sum(members) for members in lazy.group_outcomes.values()) < 4


def test_where_success_is_not_needed_groups_report_what_their_members_were_rewarded_with() -> None:
    dense = ["env.reward=dense", "env.success_bonus=0"]
    columns, report, _ = roll(stage_for(*GRPO, *dense, group_size=2, needs_success=False), StepContext(0), 3)
    rewards = torch.cat([torch.where(c.valid, c.rewards, 0.0).sum((0, 2)) for c in columns.values()])
    found = [outcome for _, members in sorted(report.group_outcomes.items()) for outcome in members]
    assert found == rewards.tolist()
    assert len(set(found)) == 8  # groups start apart, and their members act alike


def test_columns_tell_the_tasks_of_rows_where_a_learner_asks_for_them() -> None:
    stage = stage_for("env.instruction=go there")
    stage._config = replace(stage._config, tells_tasks=True)
    columns, _, _ = roll(stage, StepContext(0), 3)
    known = {int(task) for column in columns.values() for task in column.tasks.flatten()}
    assert known == {zlib.crc32(b"go there")}
    assert all(column.tasks.shape == column.valid.shape[:2] for column in columns.values())


def test_success_is_asked_for_where_there_is_none_before_any_policy_is_made() -> None:
    pendulum = ["env=gymnasium", "env.id=Pendulum-v1", "env.horizon=12", "policy=actor_critic"]
    config = tiny(*GRPO, *pendulum)
    stage = EnvStage(training_workflow(config, "x").stages["env"].config)  # pyright: ignore[reportArgumentType]
    new = NewPolicyStage(NewPolicyConfig(config.env, config.policy, 0, needs_success=config.algorithm.needs_success))
    new.setup(solo_context((0,)))
    for build in (lambda: stage.setup(solo_context(range(4))), lambda: new.save_policy(StepContext(0), "x")):
        with pytest.raises(ConfigError, match=r"env.task is 'Pendulum-v1'.*does not tell.*success_only=false"):
            build()
    assert not tiny(*GRPO, *pendulum, "algorithm.success_only=false").algorithm.needs_success


def test_running_episodes_are_carried_over_and_restored_bit_for_bit() -> None:
    overrides = ["env.carry_over=true", "env.chunks_per_rollout=2"]
    straight, resumed = stage_for(*overrides), stage_for(*overrides)
    roll(straight, StepContext(0), 2)
    state = straight.export_snapshot(StepContext(1))
    assert state
    assert state.tensors[CARRY_OVER]
    resumed.import_snapshot(StepContext(1), [state])
    expected, report, _ = roll(straight, StepContext(1), 2)
    found, found_report, _ = roll(resumed, StepContext(1), 2)
    assert found_report == report
    for block, column in expected.items():
        for name in ("rewards", "terminated", "truncated", "valid", "privileged", "final_index"):
            assert torch.equal(getattr(column, name), getattr(found[block], name)), name
        assert torch.equal(column.last.proprio, found[block].last.proprio)


@pytest.mark.parametrize("shards", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_an_episode_does_not_depend_on_the_shard_that_holds_its_row(shards) -> None:
    expected = starts(stage_for(), StepContext(5))
    stage = EnvStage(EnvStageConfig(tiny().env, 3))
    context = solo_context(range(4))
    context.shards = shards
    stage.setup(context)
    shown = {block: o for part in shards for block, o in stage.open(StepContext(5), part).items()}
    assert torch.equal(torch.cat([o.proprio for o in shown.values() if o is not None]), expected)


class CoinEnv:
    """Half of the episodes (by their seeds) are solved in the first chunk, the others fail when their time is over."""

    def __init__(self, num_envs: int, horizon: int, chunk: int) -> None:
        self.spec = env_spec("coin", num_envs, chunk, horizon, 2, 1, 1, 4, ())
        self.seeds, self.age = [0] * num_envs, [0] * num_envs
        self.started: list[int] = []
        self.stepped: list[int] = []

    def _observation(self) -> Observation:
        n = self.spec.num_envs
        return observed(torch.zeros(n, 1), ("toss",) * n, None, torch.zeros(n, 1))

    def reset(self, seeds: list[int], rows: list[int] | None = None) -> Observation:
        for row, seed in zip(rows or range(self.spec.num_envs), seeds, strict=True):
            self.seeds[row], self.age[row] = seed, 0
            self.started.append(seed)
        return self._observation()

    def step_chunk(self, actions: torch.Tensor, next_seeds: list[int]) -> ChunkResult:
        n, chunk = self.spec.num_envs, self.spec.chunk
        ends = []
        for row, seed in enumerate(self.seeds):
            if self.age[row] == 0:
                self.stepped.append(seed)
            self.age[row] += chunk
            lucky = seed % 2 == 0
            if lucky or self.age[row] >= self.spec.horizon:
                metrics = {"success_once": float(lucky), "success_at_end": float(lucky)}
                ends.append(EpisodeEnd(row, seed, metrics))
        rows = tuple(end.row for end in ends)
        flags = torch.zeros(n, chunk, dtype=torch.bool)
        if rows:
            self.reset([next_seeds[row] for row in rows], list(rows))
        final = observed(torch.zeros(len(rows), 1), ("toss",) * len(rows)) if rows else None
        rewards, state = torch.zeros(n, chunk), torch.zeros(n, chunk, 1)
        observation = self._observation()
        return ChunkResult(rewards, flags, flags, ~flags, flags, state, rows, final, observation, tuple(ends))


def tossed(monkeypatch: pytest.MonkeyPatch, *overrides: str, rollouts: int) -> tuple[CoinEnv, list[RolloutReport]]:
    """Rolls out 64 rows of coins, whose episodes have at most 10 chunks, for 20 chunks each time."""
    config = tiny(
        *("env.num_envs=64", "env.block_size=16", "env.horizon=40", "env.chunks_per_rollout=20"), *overrides
    ).env
    env = CoinEnv(config.num_envs, config.horizon, config.chunk)
    monkeypatch.setattr("rlinf_embodied.embodied.env_stage.make_env", lambda *arguments: env)
    stage = EnvStage(EnvStageConfig(config, 3))
    stage.setup(solo_context(range(4)))
    idle = {block: torch.zeros(16, 4, 2) for block in range(4)}
    reports = []
    for iteration in range(rollouts):
        stage.open(StepContext(iteration), (0, 1, 2, 3))
        for step in range(20):
            stage.step(StepContext(iteration, chunk_step=step), idle)
        report = stage.close(StepContext(iteration), dict.fromkeys(range(4))).report
        assert isinstance(report, RolloutReport)
        reports.append(report)
    return env, reports


def share_solved(reports: list[RolloutReport]) -> float:
    episodes = [e for report in reports for e in report.episodes]
    return sum(e.metrics["success_once"] for e in episodes) / len(episodes)


def test_the_curve_is_not_biased_towards_episodes_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    env, reports = tossed(monkeypatch, rollouts=6)
    started = len(env.stepped)  # an episode that is to begin when the rollout ends was not cut
    assert started < len(env.started)
    truth = sum(seed % 2 == 0 for seed in env.stepped) / started
    assert sum(len(report.episodes) + report.num_cut for report in reports) == started
    assert share_solved(reports) == pytest.approx(truth, abs=0.05)
    # what counting all that ended would say: the failures that were cut are missing
    running = sum(seed % 2 == 1 for seed in env.seeds)
    naive = truth * started / (started - 6 * running)
    assert naive > truth + 0.03


def test_episodes_that_are_carried_over_count_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    env, reports = tossed(monkeypatch, "env.carry_over=true", rollouts=6)
    counted = [e.seed for report in reports for e in report.episodes]
    assert sorted([*counted, *env.seeds]) == sorted(env.started)  # those that still run are all that is missing
    assert {report.num_cut for report in reports} == {0}


def test_a_stage_that_leaves_its_worker_closes_its_simulators(monkeypatch) -> None:
    closed = []
    monkeypatch.setattr(PointSimulator, "close", lambda self: closed.append(self))
    stage = stage_for()
    sessions = [shard.env for shard in stage._shards.values()]
    stage.leave()
    stage.leave()
    assert len(closed) == len(sessions) == 1


SHORT = [
    *("env.chunk=4", "env.execute_steps=3", "env.horizon=10", "env.chunks_per_rollout=4"),
    *("run.num_iterations=2", "algorithm.max_resamples=0"),
]


def test_steps_that_are_not_executed_do_not_count(tmp_path: Path) -> None:
    config = tiny(f"run.dir={tmp_path}", *SHORT, "algorithm.ratio_level=chunk")
    assert config.env.chunks_per_episode == 4
    summary = train(config)
    assert summary["iterations"] == 2
    rows = config.env.num_envs
    for row in metric_rows(tmp_path):
        assert row["rollout/env_steps"] <= rows * 4 * 3
        assert row.get("rollout/episode_len", 10) <= 10
