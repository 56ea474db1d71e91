"""Small runs of the reasoning workflow for tests: short sums, a model of ten thousand parameters, one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from runs import fresh

from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.interfaces.language import TokenBatch, padded
from rlinf_embodied.reasoning.batch import Completions

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
    return fresh(compose_math, tiny_math_overrides(*overrides))


def completions(
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    *,
    ended: Sequence[bool] | None = None,
    texts: Sequence[str] | None = None,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> Completions:
    """Returns completions of one turn, a row for each prompt: as many of each problem, in their order."""
    return Completions(
        problems=tuple(problems),
        texts=tuple(texts or [""] * len(rows)),
        version=0,
        rows=TokenBatch.of(prompts, rows),
        log_probs=padded(log_probs or [[0.0] * len(row) for row in rows], torch.float32),
        ended=torch.tensor(ended or [True] * len(rows)),
        samples=tuple(range(len(rows))),
        turns=len(rows),
        agent_rewards=(None,) * len(rows),
    )


def sft(*overrides: str) -> MathConfig:
    """Returns the config of a fine-tuning of four iterations, with a checkpoint after the second."""
    shared = [f"{k}={v}" for k, v in TINY_MATH.items() if not k.startswith(("algorithm.", "warm_start.", "run.num"))]
    numbers = ["steps=36", "steps_per_iteration=10", "num_examples=96", "lr=1e-2", "num_held_out=16"]
    asked = [*(f"algorithm.{text}" for text in numbers), "checkpoint.every=2", "eval.num_samples=0"]
    return compose_math([*shared, "algorithm=sft", *asked, *overrides])
