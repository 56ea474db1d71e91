"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169): evaluates only recorded actions.

V <-- expectile of the targets' Q(s, a)    Q <-- r + gamma V(s')    policy <-- min(exp(scale (Q - V)), limit) log pi(a)
"""
# ruff: noqa: F722 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.critics import CriticsAlgorithm, CriticsConfig, joined
from rlinf_embodied.algorithms.transitions import ACTION, NEXT_STATE, STATE, Columns, each_update, length, step_on
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.learning.gradients import LossSums, loss_sums
from rlinf_embodied.runtime.host import StepContext

_VALUE, _POLICY, _CRITICS = "value_optimizer", "policy_optimizer", "critics_optimizer"  # in a checkpoint
_STATISTIC = "statistic"


@dataclass(kw_only=True, slots=True)
class IQLConfig(CriticsConfig):
    """Implicit Q-learning from recorded transitions (arXiv:2110.06169)."""

    name = "iql"
    acts = False
    policy_method = "log_density"

    expectile: float = 0.7  # V is this expectile of Q over the recorded actions
    advantage_scale: float = 3.0  # of exp(scale (Q - V)), the weight of a recorded action in imitation ...
    advantage_limit: float = 100.0  # ... and its largest value
    cosine: bool = False  # whether the policy's learning rate decays to 0 by a cosine over the run's updates

    def __post_init__(self) -> None:
        CriticsConfig.__post_init__(self)
        require_numbers(self, "algorithm", "advantage_scale", low=0)
        require_numbers(self, "algorithm", "advantage_limit", low=0, above=True)
        require(0 < self.expectile < 1, "algorithm.expectile", self.expectile, "it lies in (0, 1)", "use 0.7")

    def make(self, training: Training) -> IQL:
        return IQL(training)


class IQL(CriticsAlgorithm):
    """A value network, critics with targets, and a policy that imitates actions weighted by their advantage."""

    algorithm: IQLConfig

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._value = self._networks(1, self._policy.state_dim)
        self.learners = {
            _VALUE: self._learner(self._value.parameters(), algorithm.value_lr, _STATISTIC),
            _CRITICS: self._learner(self._critics.parameters(), algorithm.value_lr, _STATISTIC),
            _POLICY: self._learner(self._policy.policy_parameters(), algorithm.lr, _STATISTIC),
        }
        self.modules["value"] = self._value

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        """Updates V first, then the policy by its advantages, then the critics, as in the authors' code."""
        fitted, number, algorithm = self._fitted(), length(next(iter(data.values()))), self.algorithm
        order = {_VALUE: self._value_sums, _POLICY: self._policy_sums, _CRITICS: self._critic_sums}
        for k, batch in enumerate(each_update(data)):
            if algorithm.cosine:
                done = (step_context.iteration + k / number) / max(1, self.training.num_iterations)
                self.learners[_POLICY].lr = algorithm.lr * (1 + math.cos(math.pi * done)) / 2
            for name, sums in order.items():
                fitted[name].add(step_on(self.learners[name], batch, sums))
            self._move_targets()
        return {
            "losses/value_loss": fitted[_VALUE].loss,
            "losses/critic_loss": fitted[_CRITICS].loss / self.algorithm.num_critics,
            "losses/policy_loss": fitted[_POLICY].loss,
            "losses/q": fitted[_CRITICS].mean(_STATISTIC),
            "losses/advantage": fitted[_VALUE].mean(_STATISTIC),
            "losses/advantage_weight": fitted[_POLICY].mean(_STATISTIC),
        }

    def _advantages(self, columns: Columns) -> Tensor:
        """Returns Q - V of the recorded actions [M], with a gradient only for V."""
        with torch.no_grad():
            best = self._targets(joined(columns[STATE], columns[ACTION])).amin(0)
        return best - self._value(columns[STATE])[0]

    def _value_sums(self, columns: Columns) -> LossSums:
        advantages = self._advantages(columns)
        loss = expectile_loss(advantages, self.algorithm.expectile)
        return loss_sums(loss, len(advantages), advantages.detach().sum())

    def _policy_sums(self, columns: Columns) -> LossSums:
        with torch.no_grad():
            advantages = self._advantages(columns)
        weights = (self.algorithm.advantage_scale * advantages).exp().clamp(max=self.algorithm.advantage_limit)
        log_probs = self._policy.log_density(self._encode(columns[STATE]), columns[ACTION][:, None]).sum(-1)
        return loss_sums(-(weights * log_probs).sum(), len(weights), weights.sum())

    def _critic_sums(self, columns: Columns) -> LossSums:
        with torch.no_grad():
            after = self._value(columns[NEXT_STATE])[0]
        return self._fit_sums(columns, after)


def expectile_loss(advantages: Float[Tensor, " M"], expectile: float) -> Float[Tensor, ""]:
    """Returns sum_m |tau - 1(u < 0)| u^2 of u = Q - V, equation 5: at its minimum V is the expectile tau of Q."""
    weights = torch.where(advantages < 0, 1 - expectile, expectile)
    return (weights * advantages.square()).sum()
