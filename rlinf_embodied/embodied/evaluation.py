"""Evaluation as ManiSkill defines it: whole episodes, no partial resets, a fixed list of held-out seeds.

Episode k has the reset seed `eval.seed + k`; round r evaluates the episodes r * num_envs ..., dealt to the blocks of
all workers.  Evaluation seeds lie below 2^30, training seeds do not, so that the two sets are disjoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import RolloutReport
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig, EvalConfig, HierarchyConfig, PolicyConfig, Precision, RunConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.video import write_video
from rlinf_embodied.embodied.detectors import Watch, WatchedEpisode, warnings
from rlinf_embodied.embodied.env_stage import Blocks, Controller, EnvStage, EnvStageConfig, Shard
from rlinf_embodied.embodied.hierarchy import HIGH_POLICY, TwoLevelConfig, TwoLevelStage
from rlinf_embodied.embodied.outcome import EvaluationResult, episode_means, filmed_seeds
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, RolloutStage, episodes_of
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import EnvSpec, EpisodeEnd, Observation
from rlinf_embodied.randomness import uniform
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.metrics import Rate
from rlinf_embodied.workflow.graph import CORES, Loop, Repeat, RepeatDecision, StageSpec, Workflow

_VIDEO = (20, {"crf": "20", "preset": "veryfast"})  # frames per second, options of x264
Acting = Literal["policy", "expert", "random"]  # expert and random act inside the env stage, which knows what they need


@dataclass(frozen=True, slots=True)
class Films:
    """Episodes to film, by their seeds; `only`: no others are run."""

    seeds: Sequence[int]
    only: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationEnvConfig(EnvStageConfig):
    """An EnvStageConfig for held-out episodes."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    videos: str | None = None  # folder
    acting: Acting = "policy"
    exact: bool = True  # whether plans may not show in the results

    @property
    def greedy_rounds(self) -> int:
        """Rounds before those of eval.sampled_episodes."""
        return -(-self.eval.num_episodes // self.env.num_envs)


def held_out(
    env: EnvConfig, how: EvalConfig, run: RunConfig, videos: str | None = None, acting: Acting = "policy"
) -> EvaluationEnvConfig:
    """Returns the whole episodes to run in an env; run.seed is of sampled or random actions, `videos` a folder."""
    rows, rule = min(how.num_envs, how.num_episodes), f"all {env.chunk} actions of a chunk are executed: none overlap"
    overlap, action = env.executed < env.chunk or how.temporal_ensemble is None, "use env.execute_steps=1, as ACT"
    require(overlap, "eval.temporal_ensemble", how.temporal_ensemble, rule, action)
    whole = replace(
        env,
        num_envs=rows,
        block_size=math.gcd(env.block_size, rows),
        auto_reset=False,
        carry_over=False,
        hold_steps=1 if how.end_at_success else 0,
        chunks_per_rollout=env.chunks_per_episode,
    )
    shown = {"videos": videos, "acting": acting, "exact": run.exact.holds, "ensemble": how.temporal_ensemble}
    return EvaluationEnvConfig(whole, run.seed, eval=how, **shown)


class EvaluationEnvStage(EnvStage):
    """Runs held-out episodes, films some of them, and reports their metrics."""

    def __init__(self, config: EvaluationEnvConfig) -> None:
        super().__init__(config)
        self._eval = config
        self._watches: dict[Blocks, Watch] = {}
        self._traces: dict[Blocks, list[tuple[Tensor, Tensor]]] = {}  # state [N, P] and actions [N, C, A], if filmed

    def _numbers(self, shard: Shard, step_context: StepContext) -> np.ndarray:
        return episodes_of(self._eval.env, step_context.round, shard.env_ids)

    def open(self, step_context: StepContext, blocks: Blocks) -> dict[int, Observation | None]:
        """Starts this round's episodes; rows beyond the last episode stay frozen."""
        shard, how, rounds = self._shards[blocks], self._eval.eval, self._eval.greedy_rounds
        numbers, again = self._numbers(shard, step_context), step_context.round >= rounds
        numbers, limit = numbers - again * rounds * self._eval.env.num_envs, how.num_episodes
        limit, seeds = how.num_sampled if again else limit, how.seed + numbers
        films = cast(Films, step_context.message)
        filmed = np.isin(seeds, films.seeds)
        rows = np.nonzero((numbers < limit) & (filmed | (not films.only)))[0].tolist()
        self._begin(shard, seeds)
        self._traces[blocks] = []
        shard.running[:] = False
        shard.running[rows] = True
        records = self._eval.videos is not None and not again
        shard.env.record([row for row in rows if filmed[row] and records], how.video_size)
        if rows:
            shard.observation = shard.env.reset([int(seeds[row]) for row in rows], rows)
            self._watches[blocks] = Watch(shard.observation, getattr(shard.env, "solved", None))
        return self._by_block(shard, shard.observation) if shard.observation else dict.fromkeys(blocks)

    def step(self, step_context: StepContext, actions: Mapping[int, Tensor | None]) -> dict[int, Observation | None]:
        """As in training; the expert, if it acts, sees the state before each of the chunk's steps."""
        if self._eval.acting == "policy" or all(chunk is None for chunk in actions.values()):
            return super().step(step_context, actions)
        shard = self._shards[tuple(actions)]
        if self._eval.acting == "expert":
            return self._advance(shard, lambda substep: shard.env.expert_actions(), None)
        spec, keys = shard.env.spec, (self._numbers(shard, step_context), step_context.chunk_step)
        drawn = uniform(self._eval.seed, "random", *keys, shape=(spec.chunk, spec.action_dim))
        return self._advance(shard, torch.from_numpy(drawn * 2 - 1), None)

    def _advance(self, shard: Shard, actions: Controller, seeds: Sequence[int] | None) -> dict[int, Observation | None]:
        if self._eval.videos is not None and isinstance(actions, Tensor) and shard.observation is not None:
            seen = actions.expand(len(shard.env_ids), -1, -1)
            self._traces[shard.blocks].append((shard.observation.proprio.cpu(), seen.cpu()))
        shown = super()._advance(shard, actions, seeds)
        self._watches[shard.blocks].step(actions if isinstance(actions, Tensor) else None, shard.results[-1])
        return shown

    def _write_trace(self, path: Path, shard: Shard, row: int) -> None:
        """Writes an episode's actions [t, A], and of each policy call the env step and the state [n, P] before it."""
        kept = [
            (state[row], chunk[row][result.valid[row].cpu()])
            for (state, chunk), result in zip(self._traces[shard.blocks], shard.results, strict=False)
            if result.valid[row].any()
        ]
        if kept:
            steps = np.cumsum([0, *(len(chunk) for _, chunk in kept)])[:-1]
            states = torch.stack([state for state, _ in kept])
            np.savez(path, actions=torch.cat([chunk for _, chunk in kept]), state=states, step=steps)

    def close(self, step_context: StepContext, blocks: Mapping[int, object]) -> Output:
        """Returns no data, only the report; writes the videos, and actions and states of their episodes."""
        shard, files = self._shards[tuple(blocks)], dict[int, str]()
        steps = sum(int(result.valid.sum()) for result in shard.results)
        ends = {end.row: end for end in shard.ended}
        for row, frames in shard.env.take_frames().items():
            if frames and self._eval.videos is not None:
                folder, known = Path(self._eval.videos) / f"step_{step_context.iteration}", ends[row].metrics
                outcome = f"return={known['return']:.1f}"
                if "success_once" in known:
                    outcome = f"success={int(known['success_once'] > 0)}"
                name = f"{file_name(shard.env.spec.task)}--seed={ends[row].seed}--{outcome}.mp4"
                write_video(folder / name, [frame.cpu().numpy() for frame in frames], *_VIDEO)
                files[row] = f"{folder.name}/{name}"
                self._write_trace((folder / name).with_suffix(".npz"), shard, row)
        if step_context.round == 0 and len(ends) > 1 and shard.env.spec.cameras:
            self._compare_rows(shard, ends)
        shard.results, watches, ids = [], self._watches, shard.env_ids.tolist()
        watched = (watches[shard.blocks].episode(end, ids[row], files.get(row, "")) for row, end in ends.items())
        return Output(dict.fromkeys(blocks), RolloutReport(tuple(watched), steps, {}))

    def _compare_rows(self, shard: Shard, ends: Mapping[int, EpisodeEnd]) -> None:
        """Begins the episode of each row again in the next one, for the detectors, and freezes all rows."""
        if getattr(shard.env, "history_free", False):
            rows = sorted(ends)
            again = shard.env.reset([ends[row].seed for row in rows[:-1]], rows[1:])
            self._watches[shard.blocks].compare_rows(rows, again)
            shard.env.restore([None] * len(shard.env_ids))


def policy_stage(
    name: str,
    policy: PolicyConfig | None,
    folder: str,
    asked: EvaluationEnvConfig,
    hierarchy: HierarchyConfig | None = None,
    high_folder: str = "",
    precisions: Sequence[Precision] = (Precision.float32, Precision.float32),
) -> StageSpec:
    """Returns the stage in which the policy of a folder acts; of two levels, with the high-level one of another.

    `precisions` are those in which the low-level or only policy, and the high-level one, were trained.
    """
    if policy is None:
        return StageSpec(name, f"{__name__}.NoPolicyStage", None)
    low = PolicyStageConfig(
        *(policy, folder, asked.env, asked.seed),
        exact=asked.exact,
        precision=precisions[0],
        greedy=asked.eval.greedy,
        greedy_rounds=asked.greedy_rounds,
        records=False,
        evaluates=True,
    )
    if hierarchy is None or not hierarchy.on:
        return StageSpec(name, f"{RolloutStage.__module__}.RolloutStage", low)
    high = replace(low, policy=hierarchy.policy, folder=high_folder, precision=precisions[1], name=HIGH_POLICY)
    if hierarchy.frozen:  # it acts greedily in training, too
        low = replace(low, greedy=True, greedy_rounds=None)
    return StageSpec(name, f"{TwoLevelStage.__module__}.TwoLevelStage", TwoLevelConfig(low, high, hierarchy))


class NoPolicyStage:
    """Stands where a policy would, while expert or random actions are taken inside the env stage."""

    def __init__(self, config: None) -> None: ...

    def setup(self, context: StageContext) -> None: ...

    def step(
        self, step_context: StepContext, observations: Mapping[int, Observation | None]
    ) -> dict[int, Tensor | None]:
        """Returns an empty placeholder for each block that has something to show."""
        return {block: None if o is None else torch.empty(0) for block, o in observations.items()}

    def close(self, step_context: StepContext, observations: Mapping[int, Observation | None]) -> Output:
        return Output(dict.fromkeys(observations))


class Evaluation:
    """The evaluation workflow on all devices of a session: env and policy in a loop, round by round."""

    shares_with: str | None = None

    def __init__(
        self,
        asked: EvaluationEnvConfig,
        policy: StageSpec,
        session: Session,
        cluster: Cluster,
        target: float | None = None,
        progress: ShowProgress | None = None,
        seen: Mapping[str, set[int]] | None = None,
        table: Path | None = None,
        choose_films: Callable[[Sequence[WatchedEpisode]], list[int]] | None = None,
    ) -> None:
        """Builds the stages for episodes that `held_out` gives.

        With a `target`, the share of episodes that have to end solved, the rest is not run once too many did not.
        `progress` is called after each round with ("episodes", done, total, how many are solved).  `seen` are seeds
        that training has used, by what for; a CSV `table` gets a row for each episode.  After the first evaluation of
        a table, `choose_films` returns seeds of its episodes, which are run again and filmed; later ones film the same
        seeds.
        """
        env, how = asked.env, asked.eval
        self.stage, self._opener = policy.name, policy.name.replace("policy", "env")
        self._one_policy = policy.target.endswith(f".{RolloutStage.__name__}")
        self._num_episodes = how.num_episodes
        self._target, self._progress, self._seen, self._table = target, progress, seen or {}, table
        loop = Loop("evaluation", self._opener, policy.name, env.chunks_per_rollout)
        self._greedy_rounds = asked.greedy_rounds
        rounds = self._greedy_rounds + -(-how.num_sampled // env.num_envs)
        again = Repeat("evaluation", None, self._opener, self._decide, rounds)
        kinds = CORES if cluster.cores_beside else ()
        opener = StageSpec(self._opener, f"{__name__}.EvaluationEnvStage", asked, kinds=kinds)
        stages = {opener.name: opener, policy.name: policy}
        workflow = Workflow("evaluation", env.num_blocks, stages, loops={"evaluation": loop}, repeat=again)
        self.executor = Executor.on_all_devices(workflow, session, cluster)
        self.env_spec = of_type(self.executor.facts[opener.name], EnvSpec)[0]
        chooses = asked.videos is not None and self.env_spec.has_success and not how.film_seeds
        self._choose_films = choose_films if chooses else None
        self._films: Sequence[int] = how.film_seeds or range(how.seed, how.seed + how.num_videos)
        if self._choose_films is not None and table is not None:
            episodes = range(how.seed, how.seed + how.num_episodes)
            self._films = [seed for seed in filmed_seeds(table) if seed in episodes]
        rule = f"{self.env_spec.task} does not tell whether it is solved, so no share of its episodes can be"
        require(target is None or self.env_spec.has_success, "run.until_success", target, rule, "leave it out")

    def _decide(self, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
        """Reports the progress; ends early once too many episodes have failed for the target to be reached."""
        greedy = rounds[: self._greedy_rounds]
        episodes = [e for reports in greedy for report in of_type(reports, RolloutReport) for e in report.episodes]
        if self._progress is not None and self._wanted == self._num_episodes and len(rounds) <= self._greedy_rounds:
            solved = sum(episode.metrics["success_once"] > 0 for episode in episodes if self.env_spec.has_success)
            remark = f"{solved} solved" if self.env_spec.has_success else ""
            self._progress("episodes", len(episodes), self._num_episodes, remark)
        failures = sum(e.metrics.get("success_at_end", 1.0) <= 0 for e in episodes)  # none where there is no success
        return RepeatDecision(failures > self._max_failures or (len(episodes) >= self._wanted and not self._samples))

    def run(self, step: int, best: float | None = None, last: bool = False) -> EvaluationResult:
        """Evaluates every episode, the `last` time some of them with sampled actions as well; `step` labels the videos.

        With a target the rest is not run once neither it nor `best`, the highest score so far, can be reached any more.
        """
        number, known = self._num_episodes, self.env_spec.has_success
        reach = 0.0 if best is None or not self._target else min(best, self._target)
        self._max_failures = max_failures(number, reach)
        self._wanted, self._samples = number, last
        if self._choose_films is not None and step == 0:
            self._films = []
        result = self.executor.run(StepContext(step, message=Films(self._films)))
        rounds = [of_type(reports, RolloutReport) for reports in result.reports[self._opener]]
        episodes, sampled = _in_order(rounds[: self._greedy_rounds]), _in_order(rounds[self._greedy_rounds :])
        if self._choose_films is not None and not self._films and (seeds := self._choose_films(episodes)):
            self._films, episodes = seeds, self._filmed(step, episodes, seeds)
        mean = episode_means(episodes)
        once, at_end = (
            Rate(sum(e.metrics[key] > 0 for e in episodes), len(episodes)) if known else None
            for key in ("success_once", "success_at_end")
        )
        whole, failures = len(episodes) == number, len(episodes) - (at_end.successes if at_end else len(episodes))
        mixed = self.executor.call(self.stage, "largest_change_alone", StepContext(step)) if self._one_policy else []
        change = max(of_type(mixed, float), default=0.0)
        found = EvaluationResult(
            *(once, at_end, mean["return"], mean["episode_len"], tuple(episodes), tuple(result.spans)),
            score=None if not whole else mean["return"] if at_end is None else at_end.value,
            at_most=1.0 - failures / number,
            sampled=tuple(sampled),
            warnings=tuple(warnings(episodes, change, self.env_spec, self._seen)),
        )
        if self._table is not None:
            found.write_table(self._table, step)
        return found

    def _filmed(self, step: int, episodes: list[WatchedEpisode], seeds: Sequence[int]) -> list[WatchedEpisode]:
        """Runs the episodes with these seeds again and films them; returns all episodes with their videos."""
        self._wanted, self._samples = len(seeds), False
        reports = self.executor.run(StepContext(step, message=Films(seeds, only=True))).reports[self._opener]
        films = _in_order([of_type(of_round, RolloutReport) for of_round in reports])
        named = {film.seed: film.video for film in films}
        return [replace(one, video=named.get(one.seed, "")) for one in episodes]


def _in_order(rounds: Sequence[Sequence[RolloutReport]]) -> list[WatchedEpisode]:
    """Returns the episodes of rounds, in the order of their seeds."""
    reports = (report for reports in rounds for report in reports)
    return sorted((e for report in reports for e in of_type(report.episodes, WatchedEpisode)), key=lambda e: e.seed)


def file_name(task: str) -> str:
    """Returns a task's name with nothing in it that a file's may not hold, "ALE/Pong-v5" as "ALE-Pong-v5"."""
    return re.sub(r"[^\w.@+=-]+", "-", task)


def max_failures(num_episodes: int, target: float) -> int:
    """Returns how many episodes may fail if a share of `target` is to succeed: 6 of 200 for 0.97."""
    return math.floor(num_episodes * (1 - target) + 1e-9)
