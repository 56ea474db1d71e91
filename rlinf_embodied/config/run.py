"""The sections `run`, `eval` and `checkpoint`: one run, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_embodied.config.checks import require


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run."""

    dir: str | None = None  # None: runs/<task>-<algorithm>-<time>
    seed: int = 0
    num_iterations: int = 60
    exact: bool = True  # the same seed gives the same weights under every plan (CPU)
    dry: bool = False  # print the resolved config and stop
    wandb: bool = False

    def __post_init__(self) -> None:
        number = self.num_iterations
        require(number >= 0, "run.num_iterations", number, "it must not be negative", "use 60")
        require(0 <= self.seed < 2**31, "run.seed", self.seed, "it lies in [0, 2^31)", "use 0")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out initial states."""

    num_episodes: int = 200
    num_envs: int = 32  # rows that are evaluated at a time, over all workers
    every: int = 0  # iterations between evaluations during training; 0: before and after only
    seed: int = 9000  # of the first episode; the following ones count up (training seeds are >= 2^30)
    greedy: bool = True  # false: sample at policy.temperature
    record_video: bool = True
    num_videos: int = 6  # episodes that are filmed
    video_size: int = 256

    def __post_init__(self) -> None:
        require(self.num_episodes >= 1, "eval.num_episodes", self.num_episodes, "it must be at least 1", "use 200")
        require(self.num_envs >= 1, "eval.num_envs", self.num_envs, "it must be at least 1", "use 32")
        require(
            self.seed >= 0 and self.seed + self.num_episodes < 2**30,
            "eval.seed",
            self.seed,
            "evaluation seeds lie in [0, 2^30), apart from training's",
            "use 9000",
        )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 10  # iterations; 0: only at the end
    keep: int = 3

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "it must not be negative", "use 0 for the end only")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "the newest one is always kept", "use 1 or more")
