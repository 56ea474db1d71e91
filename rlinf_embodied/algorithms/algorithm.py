"""The protocol of an algorithm: a config dataclass and the class that learns, in one module, chosen by `_target_`.

The dataclass inherits from AlgorithmConfig (config/algorithm.py), OnPolicyConfig, ReplayConfig, ....  Its class
variables and methods say what the driver has to know; `make` returns the class that learns, in each worker of the
learner stage.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

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


class Behind(nn.Module):
    """A policy behind a module's forward pass, which is when sliced weights are gathered."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.module, self.policy = policy.module, policy

    def forward(self, compute: Callable[[Any], Any]) -> Any:
        return compute(self.policy)


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

    def sharded(
        self, parameters: Callable[[Any], Sequence[nn.Parameter]], settings: AdamSettings, statistics: Sequence[str]
    ) -> tuple[Behind, Learner]:
        """Returns a second copy of the policy in slices, by FSDP2, and the learner of its `parameters`."""
        from rlinf_embodied.learning.sharded import ShardedLearner  # slow to import, and few need FSDP2

        training, context = self.training, self.training.context
        behind = Behind(training.copy())
        learner = ShardedLearner(
            *(behind, partial(parameters, behind.policy), Behind(self.policy), settings, statistics),
            zero_loss=self.zero_loss,
            precision=self.algorithm.precision,
            group=context.group,
            device=context.device,
            exact=training.exact,
        )
        return behind, learner

    def zero_loss(self) -> Tensor:
        """Returns 0 from a forward pass of the copy in slices: a worker takes part in every pass of the others."""
        raise NotImplementedError
