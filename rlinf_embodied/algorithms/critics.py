"""Base of algorithms with critics Q(s, a): a batched ensemble, and target networks that follow it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_embodied.algorithms.algorithm import Algorithm, Training, adam
from rlinf_embodied.algorithms.transitions import ACTION, REWARD, STATE, TERMINATED, Columns, ReplayConfig
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import PROPRIO, Observation
from rlinf_embodied.interfaces.policies import Features, ReparameterizedPolicy
from rlinf_embodied.learning.gradients import LossSums, loss_sums
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.randomness import words


class Ensemble(nn.Module):
    """E networks from [B, D] to [E, B]: ReLU layers, with LayerNorm before them if `layer_norm` (arXiv 2302.02948)."""

    def __init__(self, num: int, sizes: Sequence[int], layer_norm: bool, seed: int) -> None:
        """Draws weights and biases uniformly within 1 / sqrt(inputs of the layer), as torch's linear layers do.

        `sizes` are D, the widths of hidden layers, and 1; the global generator does not change.
        """
        super().__init__()
        generator = torch.Generator().manual_seed(int(words(seed, "critics")) >> 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for a, b in pairwise(sizes):
            bound = 1 / math.sqrt(a)
            draw = lambda *shape, bound=bound: torch.empty(shape).uniform_(-bound, bound, generator=generator)  # noqa: E731
            self.weights.append(nn.Parameter(draw(num, a, b)))
            self.biases.append(nn.Parameter(draw(num, 1, b)))
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for width in sizes[1:-1] if layer_norm else ():
            self.scales.append(nn.Parameter(torch.ones(num, 1, width)))
            self.shifts.append(nn.Parameter(torch.zeros(num, 1, width)))

    def forward(self, rows: Tensor, members: Tensor | None = None) -> Tensor:
        """Returns the values [E, B] of rows [B, D]; [K, B] for only the critics `members`, int64 [K]."""
        pick = (lambda part: part) if members is None else (lambda part: part.index_select(0, members))
        num = len(self.weights[0]) if members is None else len(members)
        *layers, (last, offset) = zip(self.weights, self.biases, strict=True)
        hidden = rows.expand(num, -1, -1)
        for k, (weight, bias) in enumerate(layers):
            hidden = torch.baddbmm(pick(bias), hidden, pick(weight))
            if len(self.scales):
                hidden = functional.layer_norm(hidden, hidden.shape[-1:])
                hidden = torch.addcmul(pick(self.shifts[k]), hidden, pick(self.scales[k]))
            hidden = hidden.relu()
        # a sum of products: a matrix product with one column is slower
        return (hidden * pick(last).mT).sum(-1) + pick(offset)[..., 0]


@dataclass(kw_only=True, slots=True)
class CriticsConfig(ReplayConfig):
    """Settings of an ensemble of critics Q(s, a) with target networks."""

    has_critic = True

    gamma: float = 0.99  # per env step
    value_lr: float = 3e-4  # of the critics
    num_critics: int = 2
    target_critics: int = 2  # the target is the minimum over so many critics, drawn for each update (REDQ)
    critic_hidden_size: int = 256
    critic_layers: int = 2
    layer_norm: bool = False  # in every hidden layer of the critics
    tau: float = 0.005  # rate at which targets follow the critics, per update

    def __post_init__(self) -> None:
        ReplayConfig.__post_init__(self)
        counts = ("num_critics", "target_critics", "critic_hidden_size", "critic_layers")
        require_numbers(self, "algorithm", *counts, low=1)
        require_numbers(self, "algorithm", "value_lr", low=0, above=True)
        require(0 <= self.gamma < 1, "algorithm.gamma", self.gamma, "it lies in [0, 1)", "use 0.99")
        require_numbers(self, "algorithm", "tau", above=True, high=1)
        few, number = self.target_critics <= self.num_critics, self.num_critics
        rule = f"the target is the minimum over some of algorithm.num_critics={number}"
        require(few, "algorithm.target_critics", self.target_critics, rule, f"use at most {number}")

    def check(self, config: TrainConfig) -> None:
        ReplayConfig.check(self, config)
        held, rule = config.env.hold_steps, "the time since the task was solved is in no state that critics see"
        action = "use 1 to end episodes once it is solved, or 0 to never end them early"
        require(held <= 1, "env.hold_steps", held, rule, action)


class CriticsAlgorithm(Algorithm):
    """Critics of states and actions, and their targets, for a policy whose actions have a differentiable density."""

    algorithm: CriticsConfig

    def __init__(self, training: Training) -> None:
        """Creates critics from the seed, and targets equal to them."""
        super().__init__(training)
        self._policy = policy = cast(ReparameterizedPolicy, training.policy)
        self._device = next(policy.module.parameters()).device
        self._dims = policy.spec.chunk * policy.spec.action_dim
        self._critics = self._networks(self.algorithm.num_critics, policy.state_dim + self._dims)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self.modules = {"critics": self._critics, "target_critics": self._targets}

    def _networks(self, num: int, inputs: int) -> Ensemble:
        algorithm = self.algorithm
        sizes = (inputs, *[algorithm.critic_hidden_size] * algorithm.critic_layers, 1)
        return Ensemble(num, sizes, algorithm.layer_norm, self.training.seed).to(self._device)

    def _learner(self, parameters: Iterable[nn.Parameter], lr: float, statistic: str) -> Learner:
        """Returns a learner whose passes report the loss and one more statistic."""
        settings, names = adam(self.algorithm, lr), ("loss", statistic)
        return Learner(list(parameters), settings, names, self.training.reducer, compile=self.algorithm.compile)

    def _fitted(self) -> dict[str, Fitted]:
        return {name: Fitted() for name in self.learners}

    def _encode(self, states: Tensor) -> Features:
        return self._policy.encode(Observation({PROPRIO: states}, ("",) * len(states)))

    def _fit_sums(self, columns: Columns, after: Tensor) -> LossSums:
        """Returns sum_e sum_m (Q_e - y)^2 / 2 (arXiv 1812.05905, equation 5), y = r + gamma (1 - d) `after` [M]."""
        targets = columns[REWARD] + self.algorithm.gamma * (1 - columns[TERMINATED]) * after
        values = self._critics(joined(columns[STATE], columns[ACTION]))
        loss = 0.5 * (values - targets).square().sum()
        return loss_sums(loss, len(targets), values.detach().mean(0).sum())

    @torch.no_grad()
    def _move_targets(self) -> None:
        for target, source in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
            target.lerp_(source, self.algorithm.tau)


def joined(states: Tensor, actions: Tensor) -> Tensor:
    """Returns the critics' input for states [M, P] and actions [M, A], or chunks of one action [M, 1, A]."""
    return torch.cat([states, actions.flatten(1)], 1)
