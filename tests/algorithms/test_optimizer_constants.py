"""Adam's constants and the noise of fine-tuning are those of the configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from control_runs import learning

from policies.actor_critic import ActorCritic
from policies.openvla.policy import OpenVLAPolicy
from policies.soft_actor import SoftActor
from policies.state_policy import StatePolicy
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.algorithms.imitation import BehaviourCloningConfig, FineTuning, Imitation, SFTConfig
from rlinf_embodied.algorithms.iql import IQL, IQLConfig
from rlinf_embodied.algorithms.ppo import PPO, PPOConfig
from rlinf_embodied.algorithms.sac import SAC, SACConfig
from rlinf_embodied.config import AlgorithmConfig, Critic, PolicyConfig
from rlinf_embodied.learning.optimizer import FlatOptimizer
from tests.observations import env_spec, observed

SPEC, STATE = env_spec("Some-v0", 4, 1, 10, 2, 3), env_spec("Some-v0", 4, 1, 10, 2, 3, 5)
GIVEN = {"beta1": 0.5, "beta2": 0.75, "adam_eps": 0.125, "weight_decay": 0.25}


@pytest.mark.parametrize(
    ("algorithm", "kind", "policy"),
    [
        (PPOConfig(), PPO, ActorCritic),
        (SACConfig(), SAC, SoftActor),
        (IQLConfig(), IQL, SoftActor),
        (BehaviourCloningConfig(), Imitation, SoftActor),
        (SFTConfig(max_grad_norm=7.0), FineTuning, StatePolicy),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_constant_of_adam_is_that_of_the_configuration(
    algorithm: AlgorithmConfig, kind, policy, monkeypatch
) -> None:
    found, init = [], FlatOptimizer.__init__
    noted = lambda self, groups: found.extend(g.settings for g in groups.values()) or init(self, groups)  # noqa: E731
    monkeypatch.setattr(FlatOptimizer, "__init__", noted)
    critic, spec = (Critic.privileged, STATE) if policy is StatePolicy else (Critic.observation, SPEC)
    learning(kind, policy(PolicyConfig(critic=critic), spec, 0), replace(algorithm, **GIVEN))
    assert {(s.betas, s.eps, s.weight_decay) for s in found} == {((0.5, 0.75), 0.125, 0.25)}
    if kind is FineTuning:
        assert {s.max_grad_norm for s in found} == {7.0}


@pytest.mark.parametrize(("given", "std"), [(None, 0.005), (0.0, 0.0), (0.1, 0.1)])
def test_the_noise_on_proprioception_is_that_of_the_configuration_or_the_policys(
    given: float | None, std, monkeypatch
) -> None:
    policy = StatePolicy(PolicyConfig(critic=Critic.privileged), STATE, 0)
    made, nothing = learning(FineTuning, policy, SFTConfig(proprio_jitter=given)), torch.zeros(500, 3)
    shown = observed(nothing, ("",) * 500, privileged=torch.zeros(500, 5))
    made._features = {0: {"proprio": nothing}}
    monkeypatch.setattr(policy, "imitation_loss", lambda features, *rest: features["proprio"].std())
    for whole in (True, False):
        data = Demonstrations(shown, torch.zeros(500, 1, 2), None)
        seen = made._sums(whole, 0, {0: data}, {0: torch.arange(500)}).loss
        assert float(seen) == pytest.approx(std, rel=0.1)
    assert OpenVLAPolicy.proprio_jitter == 0.0  # of normalised proprioception
