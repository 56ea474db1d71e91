"""The pieces of training that are run with and without pinned kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from experiments.bench.harness.trainings import in_this_process, iterations, job_of, starting_folder
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.targets import load_target

CONFIG = compose_train(["env=maniskill_pick"])


def policy_of() -> TinyVLA:
    """Returns an untrained policy of PickCube."""
    env = CONFIG.env
    spec = EnvSpec(env.task, env.num_envs, env.chunk, env.horizon, 7, 18, 42, env.obs_size, tuple(env.cameras), "none")
    return cast(TinyVLA, load_target(CONFIG.policy._target_)(CONFIG.policy, spec, 0))


def observed(rows: int, draw: torch.Generator) -> Observation:
    """Returns random pictures and states."""
    shape = (rows, len(CONFIG.env.cameras), CONFIG.env.obs_size, CONFIG.env.obs_size, 3)
    pictures = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    proprio = torch.randn(rows, 18, generator=draw)
    return Observation(images=pictures, proprio=proprio, instruction=("pick up the cube",) * rows, privileged=None)


@contextmanager
def clone() -> Iterator[Callable[[], object]]:
    """An epoch of cloning the whole policy (convolutions forward and backward) from random pictures."""
    policy, draw = policy_of(), torch.Generator().manual_seed(1)
    data = observed(128, torch.Generator().manual_seed(0))
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
    policy, draw, rows = policy_of(), torch.Generator().manual_seed(0), CONFIG.env.block_size
    observations = [observed(rows, draw) for _ in range(4)]
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
    with in_this_process(workflow, config.plan.trees) as executor:
        yield lambda: next(iterations(job_of(config), executor, 1))


PARTS = {"clone": clone, "ppo": ppo, "language": language}
