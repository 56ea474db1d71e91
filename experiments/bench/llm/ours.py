"""Our trainer on the work: what train_llm_math.py runs, with a step log.

python -m experiments.bench.llm.ours out=<folder> [start=runs/bench_llm/start] [steps=20] [devices=1] [...]

The settings are the defaults, except for those that make the objective equal to the other arms' (SAME) and those that
are fastest on a CPU (FASTEST).  Writes steps.jsonl, model/ and the run folder to `out`.  One device is this process;
two are worker processes under plan=auto.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.bench.llm.work import StepLog, Work
from rlinf_embodied.compose import compose, compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.learning.checkpoint import find_latest
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.telemetry.trace import stage_seconds
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.trainer import Trainer

SAME = (
    "algorithm.beta2=0.999",
    "algorithm.drop_zero_variance_groups=false",  # their tokens count in the mean
    "algorithm.tis_cap=null",
)
FASTEST = ("algorithm.tokens_per_microbatch=1024",)
QUICK = ("eval.num_problems=50", "eval.num_samples=0", "checkpoint.every=0")
CLUSTERS = {1: ("cluster=serial", "plan=collocated"), 2: ("cluster=local", "cluster.num_devices=2", "plan=auto")}
PARTS = {
    "time/generation_s": "generation_s",
    "time/reward_s": "reward_s",
    "time/actor_s": "forward_backward_s",  # and the optimizer's step
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Work):
    """The arguments."""

    steps: int = 20
    devices: int = 1
    out: str = ""


def overrides(work: Work, steps: int, devices: int, out: Path) -> list[str]:
    """Returns what makes our config that of the work."""
    rows = work.prompts * work.group
    together, block = (rows, rows) if devices == 1 else (min(128, rows), min(64, rows))  # one worker needs no portions
    return [
        f"run.dir={out / 'run'}",
        f"run.num_iterations={steps}",
        f"run.seed={work.seed}",
        "run.exact=exact",  # the other arms' processes are not pinned either
        "policy=folder",
        f"policy.folder={work.start}",
        f"data.level={work.level}",
        f"generation.max_new_tokens={work.new_tokens}",
        f"generation.temperature={work.temperature}",
        f"generation.rows_per_block={block}",
        f"generation.rows_per_batch={together}",
        f"generation.max_num_seqs={together}",
        f"algorithm.prompts_per_iteration={work.prompts}",
        f"algorithm.group_size={work.group}",
        f"algorithm.lr={work.lr}",
        f"algorithm.clip_low={work.clip}",
        f"algorithm.clip_high={work.clip}",
        f"algorithm.max_grad_norm={work.max_grad_norm}",
        f"algorithm.loss_level={work.loss}",
        *(*SAME, *FASTEST, *QUICK, *CLUSTERS[devices]),
    ]


class LoggedJob(ReasoningJob):
    """The job, with a line in the step log at the end of each iteration."""

    def __init__(self, config: MathConfig, log: StepLog) -> None:
        super().__init__(config)
        self._log = log

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        result, metrics = super().run_iteration(executor, progress)
        seconds = stage_seconds(result.spans)
        parts = {part: seconds.get(name, 0.0) for name, part in PARTS.items()}
        self._log.write(int(metrics["rollout/tokens"]), **parts)
        return result, metrics


def train(own: Settings) -> int:
    """Runs the training and copies its last policy to model/; returns the exit code.

    Raises:
        ConfigError: there are no settings for this number of devices.
    """
    if own.devices not in CLUSTERS:
        known = ", ".join(map(str, CLUSTERS))
        raise ConfigError(f"devices is {own.devices}, but there are settings for {known}: use one")
    torch.set_num_threads(1)
    out = Path(own.out).resolve()
    config = compose_math(overrides(own, own.steps, own.devices, out))
    code = Trainer(LoggedJob(config, StepLog(out)), started=time.time()).run()
    latest = find_latest(out / "run" / "checkpoints")
    if latest is not None:
        shutil.copytree(latest, out / "model")
    return code


if __name__ == "__main__":
    sys.exit(train(compose(Settings, sys.argv[1:])))
