"""How an algorithm learns: one class in its own module, instantiated in every worker of the learner stage.

    config dataclass (driver)     its numbers; what it learns from, and the columns of transitions it needs
    Algorithm (worker)            learners and modules, its state by name in a checkpoint; `update`, an iteration

The learner stage (embodied/learner.py) does the rest: it loads the policy, hands the data of its blocks to `update`,
and saves, restores, moves and sends everything.  docs/own_algorithm.md adds an algorithm step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.learner import Learner
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
    copy: Callable[[], Policy]  # returns another policy with the same weights, on the CPU


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
