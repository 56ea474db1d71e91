"""Small runs of the reasoning workflow for tests: short sums, a model of ten thousand parameters, one process."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

from runs import cluster, drawing

from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.reasoning import job as job_module
from rlinf_embodied.reasoning.fine_tuning import starting_policy
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.trainer import Trainer

TINY_MATH = {
    "data.level": "sum1-2-9",
    "cluster": "serial",
    "plan": "collocated",
    "run.seed": 3,
    "run.num_iterations": 3,
    "policy.hidden_size": 32,
    "policy.num_layers": 1,
    "policy.num_heads": 2,
    "policy.intermediate_size": 64,
    "policy.context_length": 40,
    "generation.max_new_tokens": 20,
    "generation.rows_per_block": 8,
    "generation.rows_per_batch": 16,
    "generation.max_num_seqs": 16,
    "algorithm.prompts_per_iteration": 8,  # 32 completions in 4 blocks, decoded in 2 sets
    "algorithm.group_size": 4,
    "algorithm.lr": 1e-3,
    "algorithm.tokens_per_microbatch": 256,
    "warm_start.steps": 240,  # some of the completions are right
    "warm_start.chain_of_thought_share": 0.2,
    "warm_start.num_examples": 1024,
    "warm_start.lr": 1e-2,
    "eval.num_problems": 24,
    "eval.num_samples": 2,
    "eval.problems_per_block": 8,
}
TWO_STEPS = ["algorithm.num_minibatches=2", "algorithm.epochs=2"]
DAPO = ["algorithm=dapo", "algorithm.max_resamples=4"]
PPO = [
    "algorithm=ppo",
    "algorithm.group_size=1",
    "algorithm.prompts_per_iteration=32",
    "algorithm.critic_warmup_iterations=1",
    "algorithm.value_lr=1e-3",
]


def tiny_math_overrides(*overrides: str) -> list[str]:
    """Returns the command line of a run that takes about a second; each key is given once, so `overrides` win."""
    given = dict(text.split("=", 1) for text in overrides)
    return [f"{key}={value}" for key, value in (TINY_MATH | given).items()]


def tiny_math(*overrides: str) -> MathConfig:
    """Returns the config of that run."""
    return copy.deepcopy(_composed(tuple(tiny_math_overrides(*overrides))))


@functools.cache  # composing takes longer than the run
def _composed(overrides: tuple[str, ...]) -> MathConfig:
    return compose_math(overrides)


def train_math(config: MathConfig, code: int = 0, draws: bool = False) -> dict:
    """Runs a whole training in this process and returns its summary ({} if it was stopped)."""
    with drawing(job_module, draws):
        assert Trainer(ReasoningJob(config)).run() == code
    path = Path(config.run.dir or "") / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def warm(config: MathConfig, session: Session | None = None, devices: int = 1) -> Path:
    """Returns the folder of the fine-tuned model that `config` starts from, made now or found in the cache."""
    return starting_policy(config, session or SerialSession(), cluster(devices), lambda *progress: None)


def math_executor(config: MathConfig, plan: list[dict], devices: int, session: Session, folder: str = "") -> Executor:
    """Returns the training workflow of `config` under a plan, started from a folder or its fine-tuned model."""
    workflow = training_workflow(config, folder or str(warm(config)))
    return Executor(workflow, resolve("test", plan, devices, workflow), session, cluster(devices))


def iterate_math(
    config: MathConfig, executor: Executor, iterations: int, progress: Progress | None = None
) -> list[dict[str, float]]:
    """Runs iterations as a training does, from where it is, and returns their metrics."""
    job, progress, found = ReasoningJob(config), progress or Progress(), []
    for _ in range(iterations):
        found.append(job.run_iteration(executor, progress)[1])
        progress.iteration += 1
    return found


def untimed_rows(folder: Path) -> list[dict]:
    """Returns what metrics.jsonl says about the training, without anything that was timed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "system/", "charts/tokens_per_s")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
