"""The sections `run`, `eval` and `checkpoint`: length, evaluation and outputs of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require, require_numbers


class Exactness(StrEnum):
    """Conditions under which a seed gives the same weights on CPUs; on the command line true is exact, false is off."""

    off = "off"
    exact = "exact"  # every plan, on one kind of processor
    portable = "portable"  # every plan, on every x86-64 processor with AVX2 (docs/determinism.md)

    @property
    def holds(self) -> bool:
        """Whether the weights must not depend on the plan."""
        return self is not Exactness.off


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run."""

    dir: str | None = None  # None: runs/<task>-<algorithm>-<time>
    seed: int = 0
    num_iterations: int = 60
    until_success: float | None = None  # stop once this fraction of a check's episodes ends solved (eval.check_*)
    patience: int = 0  # stop after this number of consecutive checks that do not reach the best one; 0: never
    exact: Exactness = Exactness.portable  # the same seed gives the same weights under every plan (CPU)
    dry: bool = False  # print the resolved config and stop
    tensorboard: bool = True  # event files in <run.dir>/tensorboard
    wandb: bool = False  # log to Weights & Biases as well (docs/seeing.md)

    @property
    def has_boards(self) -> bool:
        return self.tensorboard or self.wandb

    def __post_init__(self) -> None:
        require_numbers(self, "run", "num_iterations", "patience", low=0)
        checked, rule = self.until_success is not None, "it counts checks of run.until_success, which is not set"
        require(checked or not self.patience, "run.patience", self.patience, rule, "set run.until_success")
        target, rule = self.until_success, "it is a fraction of episodes, in (0, 1]"
        require(target is None or 0 < target <= 1, "run.until_success", target, rule, "use 0.97, or null")
        require(0 <= self.seed < 2**31, "run.seed", self.seed, "it lies in [0, 2^31)", "use 0")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out initial states."""

    num_episodes: int = 200
    num_envs: int = 32  # rows that are evaluated at once, over all workers
    every: int = 0  # iterations between evaluations during training; 0: before and after only
    seed: int = 9000  # of the first episode; the following ones count up (training seeds are >= 2^30)
    check_every: int = 8  # iterations between checks of run.until_success; the last iteration is checked as well
    check_episodes: int = 200  # of a check; it ends early once it can neither succeed nor reach the best one so far
    check_seed: int = 1_000_000  # of a check's first episode
    greedy: bool = True  # false: sample at policy.temperature
    # number of these episodes that evaluate.py and a training's last evaluation repeat with sampled actions
    sampled_episodes: int | None = None  # null: at most 100; none without greedy, of a comparison or of another policy
    # predictions of an env step are averaged with weights exp(-m i), i = 0 the oldest (ACT, arXiv:2304.13705)
    temporal_ensemble: float | None = None  # m of ACT's temporal ensembling; null: only the latest prediction is used
    end_at_success: bool = False  # an episode ends once it is solved (LIBERO); false: at env.horizon (ManiSkill)
    record_video: bool = True
    num_videos: int = 6  # of the first episodes; a training films the same each time, two thirds unsolved before it
    film_seeds: list[int] = field(default_factory=list)  # film the episodes with these seeds instead
    video_size: int = 256

    def __post_init__(self) -> None:
        require_numbers(self, "eval", "num_episodes", "num_envs", "check_every", "check_episodes", "video_size", low=1)
        require_numbers(self, "eval", "every", "num_videos", low=0)
        more, rule = self.sampled_episodes, f"they are some of the {self.num_episodes} greedy ones"
        action = f"use at most {self.num_episodes}, with eval.greedy=true"
        holds = not more or (self.greedy and 0 < more <= self.num_episodes)
        require(holds, "eval.sampled_episodes", more, rule, action)
        held_out, rule = 0 <= self.seed < 2**30 - self.num_episodes, "evaluation's seeds lie in [0, 2^30)"
        require(held_out, "eval.seed", self.seed, rule, "use 9000")
        known = all(self.seed <= seed < self.seed + self.num_episodes for seed in self.film_seeds)
        rule = f"episodes have the seeds {self.seed}..{self.seed + self.num_episodes - 1}"
        require(known, "eval.film_seeds", self.film_seeds, rule, "use some of these, or other eval.seed, num_episodes")

    @property
    def num_sampled(self) -> int:
        """Number of episodes that are repeated with sampled actions."""
        default = min(100, self.num_episodes) if self.greedy else 0
        return default if self.sampled_episodes is None else self.sampled_episodes

    @property
    def checks(self) -> EvalConfig:
        """Returns the config of the checks of run.until_success."""
        fewer: dict[str, Any] = {"film_seeds": [], "sampled_episodes": 0}
        return replace(self, seed=self.check_seed, num_episodes=self.check_episodes, **fewer)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 10  # iterations; 0: only at the end
    keep: int = 3

    def __post_init__(self) -> None:
        require_numbers(self, "checkpoint", "every", low=0)
        require_numbers(self, "checkpoint", "keep", low=1)
