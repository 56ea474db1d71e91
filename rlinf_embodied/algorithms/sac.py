"""The updates of soft actor-critic: critics, then policy and entropy coefficient, then targets.

    next action of the policy --targets--> y --critics' step--> Q --policy's step--> targets move towards the critics

With an ensemble of critics, LayerNorm, many updates per env step and demonstrations in each batch it is RLPD (Ball et
al. 2023, arXiv 2302.02948).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.critics import Ensemble
from rlinf_embodied.algorithms.soft_actor_critic import (
    critic_loss,
    entropy_coef_loss,
    move_towards,
    policy_loss,
    soft_target,
)
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
from rlinf_embodied.config import SACConfig
from rlinf_embodied.interfaces.policies import Features, ReparameterizedPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.randomness import permutation
from rlinf_embodied.runtime.host import StepContext

_CRITICS, _TARGETS, _ENTROPY = "critics", "target_critics", "entropy_coef"  # in a checkpoint
_CRITIC_LEARNER, _POLICY_LEARNER = "critics_optimizer", "policy_optimizer"


class EntropyCoefficient(nn.Module):
    """The logarithm of alpha."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(value)))


@dataclass(frozen=True, slots=True)
class _Update:
    """One update: its number, and for each block its part of the batch and the noise of both actions."""

    number: int
    columns: Mapping[int, Columns]
    noise: Mapping[int, Tensor]  # [2, R, C, A]: of the next state's action, of the state's
    members: Tensor | None  # of the target critics; None: all
    coef: Tensor  # alpha before the update


class SAC(Algorithm):
    """Critics with targets, a policy whose actions are differentiable, and the entropy coefficient."""

    algorithm: SACConfig

    def __init__(self, training: Training) -> None:
        """Makes critics that are a function of the seed, and targets that equal them.

        Raises:
            ConfigError: the policy's actions are not differentiable.
        """
        super().__init__(training)
        rule = "SAC climbs the critics through the policy's actions, and this one has no `sample`"
        policy, algorithm, seed, reducer = training.policy, self.algorithm, training.seed, training.reducer
        usable = isinstance(policy, ReparameterizedPolicy)
        training.require_policy(usable, rule, "use policy=soft_actor (docs/control.md)")
        assert isinstance(policy, ReparameterizedPolicy)
        self._policy, self._algorithm, self._seed = policy, algorithm, seed
        device = next(policy.module.parameters()).device
        dims = policy.spec.chunk * policy.spec.action_dim
        self._critics = Ensemble.of(algorithm, policy.state_dim + dims, seed).to(device)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._target_entropy = algorithm.entropy_per_dimension * dims
        fixed = algorithm.entropy_coef
        self._entropy = EntropyCoefficient(algorithm.initial_entropy_coef).to(device)
        self._fixed = None if fixed is None else torch.tensor(fixed, device=device)
        trained = policy.policy_parameters() + ([self._entropy.log] if fixed is None else [])
        compile = algorithm.compile
        adam = lambda lr: AdamSettings(lr, (0.9, 0.999), math.inf)  # noqa: E731
        self._critic_learner = ReplicatedLearner(
            list(self._critics.parameters()), adam(algorithm.value_lr), ("loss", "values"), reducer, compile
        )
        self._policy_learner = ReplicatedLearner(trained, adam(algorithm.lr), ("loss", "log_probs"), reducer, compile)
        self.learners = {_CRITIC_LEARNER: self._critic_learner, _POLICY_LEARNER: self._policy_learner}
        self.modules = {_CRITICS: self._critics, _TARGETS: self._targets, _ENTROPY: self._entropy}

    @property
    def _coef(self) -> Tensor:
        return self._entropy.log.detach().exp() if self._fixed is None else self._fixed

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        iteration, batches = step_context.iteration, data
        number = length(next(iter(batches.values())))
        noise = {block: self._noise(iteration, block, columns) for block, columns in batches.items()}
        critics, policies = (Fitted(dict.fromkeys(o.statistics, 0.0)) for o in self.learners.values())
        for k in range(number):
            update = _Update(
                number=k,
                columns={b: {name: column[k] for name, column in columns.items()} for b, columns in batches.items()},
                noise={b: drawn[k] for b, drawn in noise.items()},
                members=self._members(iteration, k),
                coef=self._coef,
            )
            rows = {block: torch.arange(len(columns[REWARD])) for block, columns in update.columns.items()}
            critics.add(self._critic_learner.step(rows, lambda b, _, u=update: [self._critic_pass(u, b)]))
            if (iteration * number + k + 1) % self._algorithm.policy_period == 0:  # periods go on over iterations
                policies.add(self._policy_learner.step(rows, lambda b, _, u=update: [self._policy_pass(u, b)]))
            move_towards(self._targets.parameters(), self._critics.parameters(), self._algorithm.tau)
        size = self._algorithm.num_critics
        return {
            "losses/critic_loss": critics.loss / size,
            "losses/q": critics.sums["values"] / max(critics.weight, 1e-8) / size,
            "losses/policy_loss": policies.loss,
            "losses/entropy": -policies.sums["log_probs"] / max(policies.weight, 1e-8),
            "losses/entropy_coef": float(self._coef),
        }

    # --------------------------------------------------------------------------------------------------------- draws
    def _noise(self, iteration: int, block: int, columns: Columns) -> Tensor:
        """Returns the noise of all updates of a block, [U, 2, R, C, A]."""
        updates, rows = columns[REWARD].shape
        ids = np.arange(updates * 2 * rows)
        drawn = self._policy.spec.noise.draw(self._seed, "soft update", block, iteration, ids)
        return drawn.unflatten(0, (updates, 2, rows)).to(columns[REWARD].device)

    def _members(self, iteration: int, number: int) -> Tensor | None:
        """Returns the critics over which a target is the minimum; None: all."""
        algorithm = self._algorithm
        if algorithm.target_critics == algorithm.num_critics:
            return None
        order = permutation(self._seed, "target critics", iteration, number, size=algorithm.num_critics)
        return torch.from_numpy(order[: algorithm.target_critics].copy()).to(self._coef.device)

    # -------------------------------------------------------------------------------------------------------- passes
    def _encode(self, columns: Columns, state: str) -> Features:
        return self._policy.encode(observation_of(columns, state))

    def _critic_pass(self, update: _Update, block: int) -> Pass:
        columns, noise = update.columns[block], update.noise[block][0]
        return Pass(
            float(len(columns[REWARD])), partial(self._critic_sums, columns, noise, update.coef, update.members)
        )

    def _critic_sums(self, columns: Columns, noise: Tensor, alpha: Tensor, members: Tensor | None) -> LossSums:
        with torch.no_grad():
            actions, log_probs = self._policy.sample(self._encode(columns, NEXT_STATE), noise)
            after = self._targets(_joined(columns[NEXT_STATE], actions), members)
            coef = alpha if self._algorithm.entropy_in_target else 0.0
            gamma = self._algorithm.gamma
            targets = soft_target(columns[REWARD], columns[TERMINATED], after, log_probs.sum(-1), coef, gamma)
        values = self._critics(torch.cat([columns[STATE], columns[ACTION]], 1))
        loss = critic_loss(values, targets)
        return _sums(loss, len(targets), values.detach().sum())

    def _policy_pass(self, update: _Update, block: int) -> Pass:
        columns, noise = update.columns[block], update.noise[block][1]
        return Pass(float(len(columns[REWARD])), partial(self._policy_sums, columns, noise, update.coef))

    def _policy_sums(self, columns: Columns, noise: Tensor, alpha: Tensor) -> LossSums:
        actions, log_probs = self._policy.sample(self._encode(columns, STATE), noise)
        log_probs = log_probs.sum(-1)
        values = self._critics(_joined(columns[STATE], actions))
        loss = policy_loss(values, log_probs, alpha, self._algorithm.pessimistic_policy)
        statistic = loss.detach()
        if self._fixed is None:
            loss = loss + entropy_coef_loss(self._entropy.log, log_probs, self._target_entropy)
        return _sums(loss, len(log_probs), log_probs.detach().sum(), statistic)


def _joined(states: Tensor, actions: Tensor) -> Tensor:
    """Returns what critics see of states [M, P] and chunks of one action [M, 1, A]."""
    return torch.cat([states, actions.flatten(1)], 1)


def _sums(loss: Tensor, number: int, second: Tensor, first: Tensor | None = None) -> LossSums:
    shown = loss.detach() if first is None else first
    return LossSums(loss, loss.new_tensor(float(number)), torch.stack([shown, second]))
