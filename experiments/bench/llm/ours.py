"""Our trainer on the work: what train_llm_math.py runs.

The settings are the defaults, except for those that make the objective equal to the other arms' (SAME) and those that
are fastest on a CPU (FASTEST).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from experiments.bench.llm.work import Step, Work
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor, IterationResult
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


def overrides(work: Work, out: Path, cores: int) -> list[str]:
    """Returns what makes our config that of the work."""
    rows = work.prompts * work.group // cores  # a block per worker
    cluster = "serial" if cores == 1 else f"local cluster.num_devices={cores}"
    words = f"""run.num_iterations={work.steps} run.seed={work.seed} policy=folder data.level={work.level}
        generation.max_new_tokens={work.new_tokens} generation.temperature={work.temperature}
        generation.rows_per_block={rows} generation.rows_per_batch={rows} generation.max_num_seqs={rows}
        algorithm.prompts_per_iteration={work.prompts} algorithm.group_size={work.group} algorithm.lr={work.lr}
        algorithm.clip_low={work.clip} algorithm.clip_high={work.clip} algorithm.max_grad_norm={work.max_grad_norm}
        cluster={cluster} plan=collocated"""
    exact = "run.exact=exact"  # the other arms' processes are not pinned either
    return [*words.split(), f"run.dir={out / 'run'}", f"policy.folder={work.start}", exact, *SAME, *FASTEST, *QUICK]


class LoggedJob(ReasoningJob):
    """The job, which notes the end of each iteration."""

    def __init__(self, config: MathConfig) -> None:
        super().__init__(config)
        self.steps: list[Step] = []

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        result, metrics = super().run_iteration(executor, progress)
        self.steps.append(Step(int(metrics["rollout/tokens"])))
        return result, metrics


def train(own: Work, out: Path, cores: int = 1) -> list[Step]:
    """Trains in this process, or with a worker per core if there are several.

    Leaves the run in out/run, and its last policy in out/model.
    """
    torch.set_num_threads(1)
    job = LoggedJob(compose_math(overrides(own, out, cores)))
    Trainer(job).run()
    shutil.copytree(out / "run/checkpoints/latest", out / "model")
    return job.steps
