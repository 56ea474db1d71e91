"""Our trainer on the work: what train_llm_math.py runs, with a step log.

python -m experiments.bench.llm.ours out=<folder> [start=runs/bench_llm/start] [steps=20] [...]

The settings are the defaults, except for those that make the objective equal to the other arms' (SAME) and those that
are fastest on a CPU (FASTEST).  Writes steps.jsonl, model/ and the run folder to `out`; runs in this process.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch

from experiments.bench.llm.work import ArmSettings, StepLog, Work
from rlinf_embodied.compose import compose, compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.learning.checkpoint import find_latest
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.trainer import Trainer

SAME = (
    "algorithm.beta2=0.999",
    "algorithm.drop_zero_variance_groups=false",  # their tokens count in the mean
    "algorithm.tis_cap=null",
)
FASTEST = ("algorithm.tokens_per_microbatch=1024",)
QUICK = ("eval.num_problems=50", "eval.num_samples=0", "checkpoint.every=0")


def overrides(work: Work, steps: int, out: Path) -> list[str]:
    """Returns what makes our config that of the work."""
    rows = work.prompts * work.group  # one worker needs no portions
    words = f"""run.num_iterations={steps} run.seed={work.seed} policy=folder data.level={work.level}
        generation.max_new_tokens={work.new_tokens} generation.temperature={work.temperature}
        generation.rows_per_block={rows} generation.rows_per_batch={rows} generation.max_num_seqs={rows}
        algorithm.prompts_per_iteration={work.prompts} algorithm.group_size={work.group} algorithm.lr={work.lr}
        algorithm.clip_low={work.clip} algorithm.clip_high={work.clip} algorithm.max_grad_norm={work.max_grad_norm}
        cluster=serial plan=collocated"""
    exact = "run.exact=exact"  # the other arms' processes are not pinned either
    return [*words.split(), f"run.dir={out / 'run'}", f"policy.folder={work.start}", exact, *SAME, *FASTEST, *QUICK]


class LoggedJob(ReasoningJob):
    """The job, with a line in the step log at the end of each iteration."""

    def __init__(self, config: MathConfig, log: StepLog) -> None:
        super().__init__(config)
        self._log = log

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        result, metrics = super().run_iteration(executor, progress)
        self._log.write(int(metrics["rollout/tokens"]))
        return result, metrics


def train(own: ArmSettings) -> int:
    """Runs the training and copies its last policy to model/; returns the exit code."""
    torch.set_num_threads(1)
    out = Path(own.out).resolve()
    config = compose_math(overrides(own, own.steps, out))
    code = Trainer(LoggedJob(config, StepLog(out)), started=time.time()).run()
    latest = find_latest(out / "run" / "checkpoints")
    if latest is not None:
        shutil.copytree(latest, out / "model")
    return code


if __name__ == "__main__":
    sys.exit(train(compose(ArmSettings, sys.argv[1:])))
