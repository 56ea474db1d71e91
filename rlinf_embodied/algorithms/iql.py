"""The updates of implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169): no action but recorded ones is scored.

V <-- expectile of the targets' Q(s, a)      Q <-- r + gamma V(s')      policy <-- exp(scale (Q - V)) log pi(a | s)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.critics import Ensemble
from rlinf_embodied.algorithms.implicit_q import advantage_weights, expectile_loss
from rlinf_embodied.algorithms.soft_actor_critic import critic_loss, move_towards
from rlinf_embodied.algorithms.transitions import (
    ACTION,
    NEXT_STATE,
    REWARD,
    STATE,
    TERMINATED,
    Columns,
    length,
    observation_of,
)
from rlinf_embodied.config import IQLConfig
from rlinf_embodied.interfaces.policies import ReparameterizedPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.runtime.host import StepContext


class IQL(Algorithm):
    """A value, critics with targets, and a policy that imitates actions by their advantage."""

    algorithm: IQLConfig

    def __init__(self, training: Training) -> None:
        """Makes critics and a value that are functions of the seed.

        Raises:
            ConfigError: the policy has no density of an action.
        """
        super().__init__(training)
        rule = "IQL raises the density of recorded actions, and this policy has no `log_density`"
        policy, algorithm, seed, reducer = training.policy, self.algorithm, training.seed, training.reducer
        usable = isinstance(policy, ReparameterizedPolicy)
        training.require_policy(usable, rule, "use policy=soft_actor (docs/control.md)")
        assert isinstance(policy, ReparameterizedPolicy)
        self._policy, self._algorithm = policy, algorithm
        device = next(policy.module.parameters()).device
        dims = policy.spec.chunk * policy.spec.action_dim
        self._critics = Ensemble.of(algorithm, policy.state_dim + dims, seed).to(device)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        width, layers, norm = algorithm.critic_hidden_size, algorithm.critic_layers, algorithm.layer_norm
        self._value = Ensemble(1, policy.state_dim, width, layers, norm, seed).to(device)
        adam = lambda lr: AdamSettings(lr, (0.9, 0.999), math.inf)  # noqa: E731
        learner = lambda trained, lr: ReplicatedLearner(  # noqa: E731
            list(trained), adam(lr), ("loss", "shown"), reducer, algorithm.compile
        )
        self.learners = {
            "value_optimizer": learner(self._value.parameters(), algorithm.value_lr),
            "critics_optimizer": learner(self._critics.parameters(), algorithm.value_lr),
            "policy_optimizer": learner(policy.policy_parameters(), algorithm.lr),
        }
        self.modules = {"critics": self._critics, "target_critics": self._targets, "value": self._value}

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        """Updates V first, then the policy by its advantages, then the critics, as the authors do."""
        fitted = {name: Fitted(dict.fromkeys(learner.statistics, 0.0)) for name, learner in self.learners.items()}
        order: dict[str, Callable[[Columns], LossSums]] = {
            "value_optimizer": self._value_sums,
            "policy_optimizer": self._policy_sums,
            "critics_optimizer": self._critic_sums,
        }
        for k in range(length(next(iter(data.values())))):
            columns = {b: {name: column[k] for name, column in part.items()} for b, part in data.items()}
            rows = {block: torch.arange(length(part)) for block, part in columns.items()}
            for name, sums in order.items():
                passes = lambda b, r, c=columns, s=sums: [Pass(float(len(r)), partial(s, c[b]))]  # noqa: E731
                fitted[name].add(self.learners[name].step(rows, passes))
            move_towards(self._targets.parameters(), self._critics.parameters(), self._algorithm.tau)
        shown = lambda name: fitted[name].sums["shown"] / max(fitted[name].weight, 1e-8)  # noqa: E731
        return {
            "losses/value_loss": fitted["value_optimizer"].loss,
            "losses/critic_loss": fitted["critics_optimizer"].loss / self._algorithm.num_critics,
            "losses/policy_loss": fitted["policy_optimizer"].loss,
            "losses/q": shown("critics_optimizer"),
            "losses/advantage": shown("value_optimizer"),
            "losses/advantage_weight": shown("policy_optimizer"),
        }

    @torch.no_grad()
    def _best(self, columns: Columns) -> Tensor:
        return self._targets(torch.cat([columns[STATE], columns[ACTION]], 1)).amin(0)

    def _value_sums(self, columns: Columns) -> LossSums:
        advantages = self._best(columns) - self._value(columns[STATE])[0]
        return _sums(expectile_loss(advantages, self._algorithm.expectile), advantages.detach())

    def _policy_sums(self, columns: Columns) -> LossSums:
        with torch.no_grad():
            advantages = self._best(columns) - self._value(columns[STATE])[0]
        weights = advantage_weights(advantages, self._algorithm.advantage_scale, self._algorithm.advantage_limit)
        features = self._policy.encode(observation_of(columns))
        log_probs = self._policy.log_density(features, columns[ACTION][:, None]).sum(-1)
        return _sums(-(weights * log_probs).sum(), weights)

    def _critic_sums(self, columns: Columns) -> LossSums:
        with torch.no_grad():
            after = self._value(columns[NEXT_STATE])[0]
            targets = columns[REWARD] + self._algorithm.gamma * (1 - columns[TERMINATED]) * after
        values = self._critics(torch.cat([columns[STATE], columns[ACTION]], 1))
        return _sums(critic_loss(values, targets), values.detach().mean(0))


def _sums(loss: Tensor, shown: Tensor) -> LossSums:
    """Returns sums over M transitions, of which `shown` [M] is a statistic."""
    return LossSums(loss, loss.new_tensor(float(len(shown))), torch.stack([loss.detach(), shown.sum()]))
