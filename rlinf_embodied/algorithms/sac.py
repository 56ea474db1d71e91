"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905): critics, policy and entropy coefficient, targets.

    next action of the policy --targets--> y --critics' step--> Q --policy's step--> targets move towards the critics

With an ensemble of critics, LayerNorm, many updates per env step and demonstrations in each batch it is RLPD (Ball et
al. 2023, arXiv 2302.02948).  Losses are sums over M transitions; E critics of an ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.critics import CriticsAlgorithm, CriticsConfig, joined
from rlinf_embodied.algorithms.transitions import NEXT_STATE, REWARD, STATE, Columns, each_update, step_on
from rlinf_embodied.config.checks import require_numbers
from rlinf_embodied.learning.gradients import LossSums, loss_sums
from rlinf_embodied.randomness import permutation
from rlinf_embodied.runtime.host import StepContext

_CRITICS, _POLICY = "critics_optimizer", "policy_optimizer"  # in a checkpoint
_NOISE = "noise"  # a column of a batch, [2, R, C, A]: noise for actions in the next state, then in the state


@dataclass(kw_only=True, slots=True)
class SACConfig(CriticsConfig):
    """Soft actor-critic (arXiv:1812.05905, table 1); with demonstrations and many critics RLPD (arXiv:2302.02948)."""

    name = "sac"
    mixes = True

    policy_period: int = 1  # updates of the critics per update of the policy, counted over iterations
    pessimistic_policy: bool = True  # the policy maximises the minimum over all critics; false: their mean
    entropy_coef: float | None = None  # null: learned
    initial_entropy_coef: float = 1.0  # of a learned coefficient
    entropy_per_dimension: float = -1.0  # target entropy per action dimension, for a learned coefficient
    entropy_in_target: bool = True  # whether the critics' target includes the entropy of the next action

    def __post_init__(self) -> None:
        CriticsConfig.__post_init__(self)
        require_numbers(self, "algorithm", "policy_period", low=1)
        require_numbers(self, "algorithm", "initial_entropy_coef", low=0, above=True)
        require_numbers(self, "algorithm", "entropy_coef", low=0)

    def make(self, training: Training) -> SAC:
        return SAC(training)


class SAC(CriticsAlgorithm):
    """Trains critics with targets, a reparameterized policy, and the entropy coefficient."""

    algorithm: SACConfig

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._target_entropy = algorithm.entropy_per_dimension * self._dims
        fixed = algorithm.entropy_coef
        initial = torch.tensor(math.log(algorithm.initial_entropy_coef), device=self._device)
        self._log_coef = nn.Parameter(initial)  # the logarithm of alpha
        self._fixed = None if fixed is None else torch.tensor(fixed, device=self._device)
        trained = self._policy.policy_parameters() + ([self._log_coef] if fixed is None else [])
        self.learners = {
            _CRITICS: self._learner(self._critics.parameters(), algorithm.value_lr, "values"),
            _POLICY: self._learner(trained, algorithm.lr, "log_probs"),
        }
        self.modules["entropy_coef"] = nn.ParameterDict({"log": self._log_coef})

    @property
    def _coef(self) -> Tensor:
        return self._log_coef.detach().exp() if self._fixed is None else self._fixed

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        algorithm, iteration, fitted = self.algorithm, step_context.iteration, self._fitted()
        number = len(next(iter(data.values()))[REWARD])
        batches = {b: columns | {_NOISE: self._noise(iteration, b, columns[REWARD])} for b, columns in data.items()}
        for k, batch in enumerate(each_update(batches)):
            coef, members = self._coef, self._members(iteration, k)
            fitted[_CRITICS].add(step_on(self.learners[_CRITICS], batch, self._critic_sums, coef, members))
            if (iteration * number + k + 1) % algorithm.policy_period == 0:  # periods continue over iterations
                fitted[_POLICY].add(step_on(self.learners[_POLICY], batch, self._policy_sums, coef))
            self._move_targets()
        critics, policies = fitted[_CRITICS], fitted[_POLICY]
        return {
            "losses/critic_loss": critics.loss / algorithm.num_critics,
            "losses/q": critics.mean("values"),
            "losses/policy_loss": policies.loss,
            "losses/entropy": -policies.mean("log_probs"),
            "losses/entropy_coef": float(self._coef),
        }

    def _noise(self, iteration: int, block: int, rewards: Tensor) -> Tensor:
        """Returns the noise of all updates of a block, [U, 2, R, C, A]."""
        updates, rows = rewards.shape
        ids = np.arange(updates * 2 * rows)
        drawn = self._policy.spec.noise.draw(self.training.seed, "soft update", block, iteration, ids)
        return drawn.unflatten(0, (updates, 2, rows)).to(rewards.device)

    def _members(self, iteration: int, number: int) -> Tensor | None:
        """Returns the critics over which a target is the minimum; None: all."""
        algorithm = self.algorithm
        if algorithm.target_critics == algorithm.num_critics:
            return None
        order = permutation(self.training.seed, "target critics", iteration, number, size=algorithm.num_critics)
        return torch.from_numpy(order[: algorithm.target_critics].copy()).to(self._device)

    def _critic_sums(self, columns: Columns, alpha: Tensor, members: Tensor | None) -> LossSums:
        """The target is y = r + gamma (1 - d) (min_e Q_e(s', a') - alpha log pi(a' | s')), equation 5."""
        with torch.no_grad():
            actions, log_probs = self._policy.sample(self._encode(columns[NEXT_STATE]), columns[_NOISE][0])
            after = self._targets(joined(columns[NEXT_STATE], actions), members).amin(0)
            if self.algorithm.entropy_in_target:
                after = after - alpha * log_probs.sum(-1)
        return self._fit_sums(columns, after)

    def _policy_sums(self, columns: Columns, alpha: Tensor) -> LossSums:
        """sum_m (alpha log pi(a | s) - Q(s, a)), equation 7, with Q the minimum over all critics, or their mean.

        And -sum_m log(alpha) (log pi(a | s) + target entropy), of which only alpha has a gradient.  Equation 18 has
        alpha in place of its logarithm; with that, as in the authors' code, alpha stays positive.
        """
        actions, log_probs = self._policy.sample(self._encode(columns[STATE]), columns[_NOISE][1])
        log_probs = log_probs.sum(-1)
        values = self._critics(joined(columns[STATE], actions))
        best = values.amin(0) if self.algorithm.pessimistic_policy else values.mean(0)
        loss = (alpha * log_probs - best).sum()
        reported = loss.detach()
        if self._fixed is None:
            loss = loss - (self._log_coef * (log_probs.detach() + self._target_entropy)).sum()
        return loss_sums(loss, len(log_probs), log_probs.detach().sum(), reported=reported)
