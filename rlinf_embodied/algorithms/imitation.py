"""Behaviour cloning and DAgger: the policy learns to do what was done, or what the expert would have done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.transitions import (
    ACTION,
    EXPERT_ACTION,
    Columns,
    each_update,
    length,
    observation_of,
    step_on,
)
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.runtime.host import StepContext

_OPTIMIZER = "policy_optimizer"  # in a checkpoint
_NOISE = "noise"  # a column of a batch: what a flow policy's loss draws


class Imitation(Algorithm):
    """One optimizer of the whole policy; policies that see learn from images, too."""

    def __init__(self, training: Training) -> None:
        """Makes the optimizer.

        Raises:
            ConfigError: the policy cannot imitate.
        """
        super().__init__(training)
        usable, algorithm = isinstance(training.policy, ImitationPolicy), self.algorithm
        training.require_policy(usable, "it has no imitation_loss", "use policy=soft_actor or policy=tiny_vla")
        self._policy = policy = cast(ImitationPolicy, training.policy)
        parameters, adam = policy.imitation_parameters(whole=True), AdamSettings(algorithm.lr, (0.9, 0.999), math.inf)
        self.learners[_OPTIMIZER] = ReplicatedLearner(parameters, adam, ("loss",), training.reducer, algorithm.compile)

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        learner = self.learners[_OPTIMIZER]
        fitted = Fitted(dict.fromkeys(learner.statistics, 0.0))
        for k, batch in enumerate(each_update(data)):
            noisy = {b: columns | self._noise(step_context.iteration, k, b, columns) for b, columns in batch.items()}
            fitted.add(step_on(learner, noisy, self._sums))
        return {"losses/imitation_loss": fitted.loss}

    def _noise(self, iteration: int, update: int, block: int, columns: Columns) -> Columns:
        noise = self._policy.imitation_noise
        if noise is None:
            return {}
        drawn = noise.draw(self.training.seed, "imitation", iteration, update, block, range(length(columns)))
        return {_NOISE: drawn.to(self.training.context.device)}

    def _sums(self, columns: Columns) -> LossSums:
        actions = columns[EXPERT_ACTION if EXPERT_ACTION in columns else ACTION]
        features = self._policy.encode_trainable(observation_of(columns))
        helped = {_NOISE: columns[_NOISE]} if _NOISE in columns else {}
        loss = self._policy.imitation_loss(features, actions[:, None], helped)
        return LossSums(loss, loss.new_tensor(float(len(actions))), loss.detach()[None])
