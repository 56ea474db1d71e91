"""The no-framework baseline of the work: generation, verifier, one forward-backward, one Adam step.

Plain functions in one process: the least that this work costs with this generation engine and this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.bench.llm.work import FORM, Step, Work, generated, prompts_of, scored, step_problems
from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.advantages import group_advantages
from rlinf_embodied.algorithms.losses import policy_loss
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.interfaces.language import TokenBatch, padded
from rlinf_embodied.reasoning.batch import dynamic_batches
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.reasoning.reward_stage import Verifier

SLOTS = 256
TOKENS_PER_MICROBATCH = 1024  # fits the caches: 512 and 4096 take up to 40 % more


def train(own: Work, out: Path) -> list[Step]:
    """Trains in this process, and saves the model in out/model."""
    torch.set_num_threads(1)
    policy = CausalLM.from_config(LanguagePolicyConfig(), Path(own.start), 0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=own.lr, weight_decay=0.0, fused=True)
    verifier, steps = Verifier(FORM), list[Step]()
    for index in range(own.steps):
        steps.append(Step(step(policy, optimizer, verifier, step_problems(own, index), own, index)))
    policy.save(out / "model")
    return steps


def step(
    policy: CausalLM,
    optimizer: torch.optim.Optimizer,
    verifier: Verifier,
    problems: Sequence[Problem],
    own: Work,
    index: int,
) -> int:
    """Makes a step on these problems; returns the tokens that were generated."""
    rows = generated(policy, problems, own, SLOTS, index)
    advantages = group_advantages(scored(policy, verifier, rows, problems).rewards).reshape(-1)
    backward(policy, problems, rows, advantages, own)
    tokens = sum(len(row.tokens) for row in rows)
    for parameter in policy.parameters():
        assert parameter.grad is not None
        parameter.grad /= tokens
    torch.nn.utils.clip_grad_norm_(policy.parameters(), own.max_grad_norm)
    optimizer.step()
    return tokens


def backward(
    policy: CausalLM, problems: Sequence[Problem], rows: Sequence[Generated], advantages: Tensor, own: Work
) -> None:
    """Leaves the gradient of the summed loss in the parameters; completions without an advantage have none."""
    old = padded([row.log_probs for row in rows], torch.float32)
    prompts = [prompt.tokens for prompt in prompts_of(policy, problems, own.group)]
    sequences = TokenBatch.of(prompts, [row.tokens for row in rows])
    kept = advantages.nonzero()[:, 0].tolist()
    policy.module.zero_grad(set_to_none=False)
    for part in dynamic_batches(sequences.lengths.tolist(), TOKENS_PER_MICROBATCH, rows=kept):
        batch = sequences.select(part)
        mask = batch.mask
        found = policy.log_probs(batch, own.temperature, with_entropy=False).log_probs
        clips, weights = (own.clip, own.clip), torch.ones(len(mask))
        policy_loss(found, old[part, : mask.shape[1]], advantages[part], mask, *clips, weights).loss.backward()
