"""The protocol of an algorithm: a config dataclass and the class that learns, in one module, chosen by `_target_`.

The dataclass inherits from AlgorithmConfig (config/algorithm.py), OnPolicyConfig, ReplayConfig, ....  The driver asks

    learns_from          rollouts of the newest weights, transitions of the replay buffer, or demonstrations
    acts                 whether the policy acts in the env; otherwise `data` is all that it learns from
    columns              of the transitions that it needs (transitions.py)
    policy_method        that the policy must have
    has_critic           whether it estimates values
    check                whether it can learn with the env, the data and the other sections of a training
    same_start           rows of the env that begin alike
    resampling           how often rollouts are repeated within an iteration
    schedule             of transitions: rows of a batch, updates of an iteration, and the first one that learns
    typical_iteration    the first iteration that does all that later ones do, which a profile measures
    make                 the class that learns, made of a Training in each worker of the learner stage

That class is an Algorithm:

    learners             by name: the parameters that one optimizer steps, in groups, and the sums of their losses
    modules              by name: the networks that belong to no policy, such as critics and targets
    update               an iteration: the data of this worker's blocks become new weights, and metrics

The learner stage (embodied/learner.py) does the rest: it loads the policy, hands the data of its blocks to `update`,
and saves, restores, moves and sends learners and modules by their names.  docs/own_algorithm.md adds one step by step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlinf_embodied.config import AlgorithmConfig, PolicyConfig
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import AdamSettings
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import StageContext, StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What an algorithm finds in a worker."""

    algorithm: Any  # its config dataclass
    policy: Policy  # what is trained, computing in algorithm.precision
    settings: PolicyConfig
    seed: int
    block_size: int  # rows of a policy call
    num_iterations: int
    exact: bool  # whether equal bits are promised
    reducer: Reducer  # sums over the blocks of all workers
    context: StageContext
    counts_ratios: bool = False  # whether metrics shall have a histogram of log ratios
    copy: Callable[[], Policy]  # returns another policy with the same weights, on the CPU


def adam(algorithm: AlgorithmConfig, lr: float, max_grad_norm: float = math.inf) -> AdamSettings:
    """Returns an algorithm's constants of Adam for a rate."""
    betas = algorithm.beta1, algorithm.beta2
    return AdamSettings(lr, betas, max_grad_norm, algorithm.adam_eps, algorithm.weight_decay)


class Algorithm(ABC):
    """The learning of one worker; all workers make the same calls."""

    def __init__(self, training: Training) -> None:
        """Makes optimizers (`learners`) and networks (`modules`); both are functions of config and seed."""
        self.training, self.algorithm, self.policy = training, training.algorithm, training.policy
        self.learners: dict[str, Learner] = {}
        self.modules: dict[str, nn.Module] = {}

    @abstractmethod
    def update(self, step_context: StepContext, data: Mapping[int, Any]) -> dict[str, float]:
        """Makes the updates of an iteration and returns metrics by name.

        What each of this worker's blocks gives is [(PolicyColumns, EnvColumns)] of all rounds where the algorithm
        learns from rollouts, and the batches of all updates, columns [U, R, ...], where it learns from transitions.
        """
