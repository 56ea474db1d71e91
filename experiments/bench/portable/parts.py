"""The pieces of training that are run with and without pinned kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from experiments.bench.harness.policies import observed, untrained
from experiments.bench.harness.trainings import in_this_process, iterations, job_of, starting_folder
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.reasoning.workflow import training_workflow

CONFIG = compose_train(["env=maniskill_pick"])


@contextmanager
def clone() -> Iterator[Callable[[], object]]:
    """An epoch of cloning the whole policy (convolutions forward and backward) from random pictures."""
    policy, draw = untrained(CONFIG, 128), torch.Generator().manual_seed(1)
    data = observed(CONFIG, 128, torch.Generator().manual_seed(0))
    actions = torch.rand(128, CONFIG.env.chunk, policy.spec.action_dim, generator=draw) * 2 - 1
    parameters = policy.imitation_parameters(True)

    def run() -> None:
        for start in range(0, 128, 8):  # a minibatch of 32 is 8 rows of each of four blocks
            rows = list(range(start, start + 8))
            loss = policy.imitation_loss(policy.encode_trainable(data.rows(rows)), actions[rows], {})
            torch.autograd.grad(loss, parameters, allow_unused=True)

    yield run


@contextmanager
def ppo() -> Iterator[Callable[[], object]]:
    """The policy's side of an iteration: act on every chunk-step, then the epochs of the update."""
    rows, draw = CONFIG.env.block_size, torch.Generator().manual_seed(0)
    policy, observations = untrained(CONFIG, rows), [observed(CONFIG, rows, draw) for _ in range(4)]
    noise = torch.rand(rows, CONFIG.env.chunk, policy.spec.action_dim, generator=torch.Generator().manual_seed(1))
    parameters = policy.policy_parameters()

    def run() -> None:
        kept = []
        for observation in observations:
            features = policy.encode(observation)
            kept.append((features, policy.act(features, noise, 0.6).record))
        for _ in range(CONFIG.algorithm.epochs):
            for features, record in kept:
                found = policy.evaluate(features, record, 0.6)
                assert found.entropy is not None
                torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), parameters, allow_unused=True)

    yield run


@contextmanager
def language() -> Iterator[Callable[[], object]]:
    """An iteration of GRPO on the default tiny model (generation, rewards, update)."""
    config = compose_math(["cluster=serial", "plan=collocated", "warm_start.steps=20", "warm_start.num_examples=256"])
    workflow = training_workflow(config, starting_folder(config, in_process=True))
    with in_this_process(workflow, config.plan.variants) as executor:
        yield lambda: next(iterations(job_of(config), executor, 1))
