"""The no-framework baseline of the work: generation, verifier, one forward-backward, one Adam step.

python -m experiments.bench.llm.bare out=<folder> [start=runs/bench_llm/start] [steps=20] [...]

Plain functions in one process: the least that this work costs with this generation engine and this model.  Writes
steps.jsonl and model/ to `out`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from experiments.bench.llm.work import FORM, ArmSettings, StepLog, generated, scored, step_problems
from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.advantages import group_advantages
from rlinf_embodied.algorithms.losses import policy_loss
from rlinf_embodied.compose import compose
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.reasoning.batch import Group, Sequences, dynamic_batches
from rlinf_embodied.reasoning.reward_stage import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ArmSettings):
    """The arguments."""

    slots: int = 256
    tokens_per_microbatch: int = 1024  # fits the caches: 512 and 4096 take up to 40 % more


def train(own: Settings) -> None:
    """Trains in this process."""
    torch.set_num_threads(1)
    policy = CausalLM.load(Path(own.start))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=own.lr, weight_decay=0.0, fused=True)
    log, verifier = StepLog(Path(own.out)), Verifier(FORM)
    for index in range(own.steps):
        log.write(step(policy, optimizer, verifier, step_problems(own, index), own, index))
    policy.save(Path(own.out) / "model")


def step(
    policy: CausalLM,
    optimizer: torch.optim.Optimizer,
    verifier: Verifier,
    problems: Sequence[Problem],
    own: Settings,
    index: int,
) -> int:
    """Makes a step on these problems; returns the tokens that were generated."""
    groups = generated(policy, problems, own, own.slots, index)
    advantages = group_advantages(scored(policy, verifier, groups, problems).rewards).reshape(-1)
    backward(policy, groups, advantages, own)
    tokens = sum(int(group.lengths.sum()) for group in groups)
    for parameter in policy.parameters():
        assert parameter.grad is not None
        parameter.grad /= tokens
    torch.nn.utils.clip_grad_norm_(policy.parameters(), own.max_grad_norm)
    optimizer.step()
    return tokens


def backward(policy: CausalLM, groups: Sequence[Group], advantages: Tensor, own: Settings) -> None:
    """Leaves the gradient of the summed loss in the parameters; completions without an advantage have none."""
    longest = max(group.log_probs.shape[1] for group in groups)
    recorded = torch.cat([pad(group.log_probs, (0, longest - group.log_probs.shape[1])) for group in groups])
    kept = advantages.nonzero()[:, 0].tolist()
    sequences, old, advantages = Sequences.of(groups).select(kept), recorded[kept], advantages[kept]
    policy.module.zero_grad(set_to_none=False)
    for rows in dynamic_batches(sequences.lengths(), own.tokens_per_microbatch):
        batch = sequences.batch(rows, policy.spec.pad_id)
        mask = batch.mask
        found = policy.log_probs(batch, own.temperature, with_entropy=False).log_probs
        clips, weights = (own.clip, own.clip), torch.ones(len(mask))
        policy_loss(found, old[rows, : mask.shape[1]], advantages[rows], mask, *clips, weights).loss.backward()


if __name__ == "__main__":
    train(compose(Settings, sys.argv[1:]))
