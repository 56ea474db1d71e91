"""The protocol of an algorithm: a module with a config dataclass and a training class, chosen by `_target_`.

The dataclass inherits from AlgorithmConfig (config/algorithm.py), OnPolicyConfig, ReplayConfig, ....  Its class
variables and methods tell the driver what it needs; `make` creates the training object in each worker of the learner
stage.

This object is an Algorithm:

    learners             by name: an optimizer with its parameter groups, and the sums of their losses
    modules              by name: networks outside the policy, such as critics and targets
    update               one iteration: updates the weights from the data of this worker's blocks, returns metrics

The learner stage (embodied/learner.py) does the rest: it loads the policy, passes the data of its blocks to `update`,
and saves, restores, moves and sends learners and modules by name.  docs/own_algorithm.md is a tutorial.
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
    """The inputs of an algorithm in a worker."""

    algorithm: Any  # its config dataclass
    policy: Policy  # the trained policy, which computes in algorithm.precision
    settings: PolicyConfig
    seed: int
    block_size: int  # rows of a policy call
    num_iterations: int
    exact: bool  # whether equal bits are promised
    reducer: Reducer  # sums over the blocks of all workers
    context: StageContext
    counts_ratios: bool = False  # whether metrics include a histogram of log ratios
    copy: Callable[[], Policy]  # returns another policy with the same weights, on the CPU


def adam(algorithm: AlgorithmConfig, lr: float, max_grad_norm: float = math.inf) -> AdamSettings:
    """Returns an algorithm's Adam settings with a learning rate."""
    betas = algorithm.beta1, algorithm.beta2
    return AdamSettings(lr, betas, max_grad_norm, algorithm.adam_eps, algorithm.weight_decay)


class Behind(nn.Module):
    """Wraps a policy in a module whose forward pass gathers sharded weights."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.module, self.policy = policy.module, policy

    def forward(self, compute: Callable[[Any], Any]) -> Any:
        return compute(self.policy)


class Algorithm(ABC):
    """The training in one worker; all workers make the same calls."""

    def __init__(self, training: Training) -> None:
        """Creates optimizers (`learners`) and networks (`modules`), both functions of config and seed."""
        self.training, self.algorithm, self.policy = training, training.algorithm, training.policy
        self.learners: dict[str, Learner] = {}
        self.modules: dict[str, nn.Module] = {}

    @abstractmethod
    def update(self, step_context: StepContext, data: Mapping[int, Any]) -> dict[str, float]:
        """Performs the updates of an iteration and returns metrics by name.

        `data` maps each of this worker's blocks to its [(PolicyColumns, EnvColumns)] of all rounds if the algorithm
        learns from rollouts, or to the batches of all updates, columns [U, R, ...], if it learns from transitions.
        """

    def sharded(
        self, parameters: Callable[[Any], Sequence[nn.Parameter]], settings: AdamSettings, statistics: Sequence[str]
    ) -> tuple[Behind, Learner]:
        """Returns a second copy of the policy, sharded by FSDP2, and the learner of its `parameters`."""
        from rlinf_embodied.learning.sharded import ShardedLearner  # slow to import, and rarely needed

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
        """Returns 0 from a forward pass of the sharded copy, since all workers must join each collective pass."""
        raise NotImplementedError
