"""A policy that computes in bfloat16 and answers in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from rlinf_embodied.config import Critic, PolicyConfig, Precision
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Evaluation, Features, Policy, PolicyOutput, Record
from rlinf_embodied.learning.precision import computing


def computed_in(precision: Precision, policy: Policy, config: PolicyConfig, device: str) -> Policy:
    """Returns the policy itself, or in bfloat16 one that has its weights and computes on `device` by autocast.

    Features stay as they come out, which halves what is kept of a frozen part.  A critic on privileged state is small,
    and stays in float32.
    """
    if precision is Precision.float32:
        return policy
    return cast(Policy, _Autocast(policy, precision, config.critic is Critic.observation, device))


class _Autocast:
    """In all that is not below it is the policy."""

    def __init__(self, policy: Policy, precision: Precision, reads_features: bool, device: str) -> None:
        self._policy, self._reads_features = policy, reads_features
        self._computing = lambda: computing(precision, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def encode(self, observation: Observation) -> Features:
        with self._computing():
            return self._policy.encode(observation)

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        with self._computing():
            found = self._policy.act(features, noise, temperature)
        actions, log_probs = found.actions.float(), found.log_probs.float()
        return replace(found, actions=actions, log_probs=log_probs, values=_float(found.values))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        with self._computing():
            found = self._policy.evaluate(features, record, temperature, entropy_gradient=entropy_gradient)
        return Evaluation(found.log_probs.float(), _float(found.entropy), _float(found.values))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        if not self._reads_features:
            return self._policy.value(features, privileged)
        with self._computing():
            return self._policy.value(features, privileged).float()


def _float(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
