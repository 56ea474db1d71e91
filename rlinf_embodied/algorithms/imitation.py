"""Behaviour cloning and DAgger: the policy learns to do what was done, or what the expert would have done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.transitions import ACTION, EXPERT_ACTION, Columns, length, observation_of
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.runtime.host import StepContext

_OPTIMIZER = "policy_optimizer"


class Imitation(Algorithm):
    """One optimizer of the whole policy; policies that see learn from images, too."""

    def __init__(self, training: Training) -> None:
        """Makes the optimizer.

        Raises:
            ConfigError: the policy cannot imitate.
        """
        super().__init__(training)
        policy, algorithm = training.policy, self.algorithm
        usable = isinstance(policy, ImitationPolicy)
        training.require_policy(usable, "it has no imitation_loss", "use policy=soft_actor or policy=tiny_vla")
        assert isinstance(policy, ImitationPolicy)
        self._policy = policy
        parameters, adam = policy.imitation_parameters(whole=True), AdamSettings(algorithm.lr, (0.9, 0.999), math.inf)
        self.learners[_OPTIMIZER] = ReplicatedLearner(parameters, adam, ("loss",), training.reducer, algorithm.compile)

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        learner = self.learners[_OPTIMIZER]
        fitted = Fitted(dict.fromkeys(learner.statistics, 0.0))
        for k in range(length(next(iter(data.values())))):
            columns = {b: {name: column[k] for name, column in part.items()} for b, part in data.items()}
            rows = {block: torch.arange(length(part)) for block, part in columns.items()}
            noise = {b: self._noise(step_context.iteration, k, b, length(part)) for b, part in columns.items()}
            passes = lambda b, r, c=columns, n=noise: [Pass(float(len(r)), partial(self._sums, c[b], n[b]))]  # noqa: E731
            fitted.add(learner.step(rows, passes))
        return {"losses/imitation_loss": fitted.loss}

    def _noise(self, iteration: int, update: int, block: int, rows: int) -> dict[str, torch.Tensor]:
        """Returns what a flow policy's loss draws, keyed."""
        noise = self._policy.imitation_noise
        if noise is None:
            return {}
        drawn = noise.draw(self.training.seed, "imitation", iteration, update, block, range(rows))
        return {"noise": drawn.to(self.training.context.device)}

    def _sums(self, columns: Columns, helped: dict[str, torch.Tensor]) -> LossSums:
        actions = columns[EXPERT_ACTION if EXPERT_ACTION in columns else ACTION]
        features = self._policy.encode_trainable(observation_of(columns))
        loss = self._policy.imitation_loss(features, actions[:, None], helped)
        return LossSums(loss, loss.new_tensor(float(len(actions))), loss.detach()[None])
