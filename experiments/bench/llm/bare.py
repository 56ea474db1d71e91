"""The no-framework baseline of the work: generation, verifier, one forward-backward, one Adam step.

python -m experiments.bench.llm.bare out=<folder> [start=runs/bench_llm/start] [steps=20] [processes=1] [...]

Plain functions in one process, or in two that halve the prompts and add their gradients up: with this generation engine
and this model nothing that does the same work can be faster.  Leaves steps-<rank>.jsonl and model/ in `out`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from experiments.bench.llm.work import FORM, Ranks, StepLog, generated, run_ranks, scored, step_problems
from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.advantages import group_advantages
from rlinf_embodied.algorithms.losses import policy_loss
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.reasoning.batch import Group, Sequences, microbatches
from rlinf_embodied.reasoning.reward_stage import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Ranks):
    """The arguments."""

    slots: int = 256
    tokens_per_microbatch: int = 1024  # fits the caches: 512 and 4096 take up to 40 % more
    skip: int = 1  # completions without an advantage are left out of the forward-backward; the gradient is the same


def train(own: Settings) -> None:
    """Trains in this process, a rank of `processes`."""
    torch.set_num_threads(own.threads)
    rank, ranks = int(os.environ.get("RANK", "0")), own.processes
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    policy = CausalLM.load(Path(own.start))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=own.lr, weight_decay=0.0, fused=True)
    log, verifier = StepLog(Path(own.out), rank), Verifier(FORM)
    for index in range(own.steps):
        problems = step_problems(own, index)[rank::ranks]
        tokens, parts = step(policy, optimizer, verifier, problems, own, index)
        log.write(tokens, **parts)
    if rank == 0:
        policy.save(Path(own.out) / "model")
    if ranks > 1:
        torch.distributed.destroy_process_group()


def step(
    policy: CausalLM,
    optimizer: torch.optim.Optimizer,
    verifier: Verifier,
    problems: Sequence[Problem],
    own: Settings,
    index: int,
) -> tuple[int, dict[str, float]]:
    """Returns (tokens generated, seconds by part) of one step on these problems."""
    marks = [time.perf_counter()]
    mark = lambda: marks.append(time.perf_counter())  # noqa: E731
    groups = generated(policy, problems, own, own.slots, index)
    mark()
    advantages = group_advantages(scored(policy, verifier, groups, problems).rewards).reshape(-1)
    mark()
    backward(policy, groups, advantages, own)
    mark()
    tokens = sum(int(group.lengths.sum()) for group in groups)
    average(policy, tokens if own.loss == "token" else len(problems) * own.group, own.processes)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), own.max_grad_norm)
    optimizer.step()
    mark()
    names = ("generation_s", "reward_s", "forward_backward_s", "optimizer_s")
    return tokens, {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}


def backward(policy: CausalLM, groups: Sequence[Group], advantages: Tensor, own: Settings) -> None:
    """Leaves the gradient of the summed loss in the parameters."""
    sequences, old = Sequences.of(groups), old_log_probs(groups)
    if own.skip:
        kept = advantages.nonzero()[:, 0].tolist()
        sequences = Sequences(*(tuple(rows[i] for i in kept) for rows in (sequences.prompts, sequences.completions)))
        old, advantages = old[kept], advantages[kept]
    policy.module.zero_grad()
    for rows, batch in microbatches(sequences, own.tokens_per_microbatch, policy.spec.pad_id):
        mask = batch.mask
        found = policy.log_probs(batch, own.temperature, with_entropy=False).log_probs
        weights = None if own.loss == "token" else 1.0 / mask.sum(1)
        sums = policy_loss(
            found, old[rows, : mask.shape[1]], advantages[rows], mask, own.clip, own.clip, weights=weights
        )
        sums.loss.backward()


def old_log_probs(groups: Sequence[Group]) -> Tensor:
    """Returns the log-probs that were recorded in generation, float32 [K * G, R]."""
    longest = max(group.log_probs.shape[1] for group in groups)
    return torch.cat([pad(group.log_probs, (0, longest - group.log_probs.shape[1])) for group in groups])


def average(policy: CausalLM, weight: float, ranks: int) -> None:
    """Divides the gradient by the weight of the batch, both summed over the ranks."""
    parameters = policy.parameters()
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    flat = torch.cat([*parts, torch.tensor([float(weight)])])
    if ranks > 1:
        torch.distributed.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


if __name__ == "__main__":
    run_ranks("bare", Settings, train)
