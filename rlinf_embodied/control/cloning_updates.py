"""The updates of behaviour cloning: the policy learns to do what was done, or what the expert would have done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch

from rlinf_embodied.config import ControlAlgorithmConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.control.transitions import ACTION, EXPERT_ACTION, STATE, Columns, length
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import Fitted


class CloningUpdates:
    """See `Updates`."""

    def __init__(self, policy: Policy, algorithm: ControlAlgorithmConfig, reducer: Reducer, seed: int) -> None:
        """Takes the policy as it is.

        Raises:
            ConfigError: it cannot be cloned.
        """
        rule, usable = "it has no imitation_loss", isinstance(policy, ImitationPolicy)
        require(usable, "policy.name", policy.spec.name, rule, "use policy=soft_actor (docs/control.md)")
        assert isinstance(policy, ImitationPolicy)
        self._policy = policy
        adam = AdamSettings(algorithm.lr, (0.9, 0.999), math.inf)
        self.learners = {
            "policy_optimizer": ReplicatedLearner(
                policy.imitation_parameters(whole=True), adam, ("loss",), reducer, algorithm.compile
            )
        }
        self.modules = {}

    def run(self, iteration: int, batches: Mapping[int, Columns]) -> dict[str, float]:
        learner = self.learners["policy_optimizer"]
        fitted = Fitted(dict.fromkeys(learner.statistics, 0.0))
        for k in range(length(next(iter(batches.values())))):
            columns = {b: {name: column[k] for name, column in part.items()} for b, part in batches.items()}
            rows = {block: torch.arange(length(part)) for block, part in columns.items()}
            passes = lambda b, r, c=columns: [Pass(float(len(r)), partial(self._sums, c[b]))]  # noqa: E731
            fitted.add(learner.step(rows, passes))
        return {"losses/imitation_loss": fitted.loss}

    def _sums(self, columns: Columns) -> LossSums:
        states = columns[STATE]
        actions = columns[EXPERT_ACTION if EXPERT_ACTION in columns else ACTION]
        features = self._policy.encode_trainable(Observation(states, ("",) * len(states)))
        loss = self._policy.imitation_loss(features, actions[:, None], {})
        return LossSums(loss, loss.new_tensor(float(len(states))), loss.detach()[None])
