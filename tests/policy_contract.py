"""What training asks of a policy, on observations of any env: used on this project's policies and on users'."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features, Policy


def require_contract(policy: Policy, config: PolicyConfig, env: EnvSpec, observation: Observation) -> None:
    """Asserts what the methods of a policy return for rows that differ."""
    spec, rows = policy.spec, len(observation)
    assert isinstance(policy, Policy)
    assert (spec.chunk, spec.action_dim) == (env.chunk, env.action_dim), "take both from the EnvSpec of __init__"
    inside = {id(p) for p in policy.module.parameters()}
    assert {id(p) for p in (*policy.policy_parameters(), *policy.value_parameters())} <= inside, "put them in .module"
    features, noise = policy.encode(observation), spec.noise.draw(0, "contract", range(rows))
    for temperature in (config.temperature, config.temperature / 20):  # what is wrong shows when it is cold
        require_scores(policy, features, noise, temperature, (rows, env.chunk, env.action_dim))
    first = policy.act(features, noise, config.temperature)
    alone = policy.encode(observation.rows([0] * rows))
    record = {name: value[[0] * rows] for name, value in first.record.items()}
    found = policy.evaluate(alone, record, config.temperature).log_probs
    assert torch.allclose(found[0], first.log_probs[0], atol=1e-3), "a row depends on its neighbours"
    if policy.value_parameters():
        require(value_of(config, policy, features, observation, env.chunk), torch.float32, (rows, env.chunk))


def require_scores(policy: Policy, features: Features, noise: Tensor, temperature: float, shape: tuple) -> None:
    """Asserts that what it chooses is a function of the noise, and scored alike by `act` and `evaluate`."""
    with torch.no_grad():
        chosen, again = (policy.act(features, noise, temperature) for _ in range(2))
        require(policy.act(features, None, temperature).actions, torch.float32, shape)
    require(chosen.actions, torch.float32, shape)
    assert chosen.actions.abs().max() <= 1, "actions lie in [-1, 1]; the env scales them"
    require(chosen.log_probs, torch.float32, (*shape[:2], policy.spec.choices))
    assert {len(value) for value in (*features.values(), *chosen.record.values())} == {shape[0]}
    for name, value in chosen.record.items():
        assert torch.equal(value, again.record[name]), "draw nothing in `act` (no dropout): use `noise`"
    found = policy.evaluate(features, chosen.record, temperature, entropy_gradient=False).log_probs
    assert torch.allclose(found, chosen.log_probs, atol=1e-3), "divide by the temperature in both"
    assert found.requires_grad


def require(value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Asserts dtype, shape, and that all numbers are finite."""
    assert (value.dtype, tuple(value.shape)) == (dtype, tuple(shape))
    assert bool(torch.isfinite(value).all())


def value_of(config: PolicyConfig, policy: Policy, features: Features, seen: Observation, chunk: int) -> Tensor:
    """Returns V; a critic on privileged state is asked without features, as at the end of a rollout."""
    repeated = None if seen.privileged is None else seen.privileged[:, None].expand(-1, chunk, -1)
    return policy.value(features if config.critic is Critic.observation else {}, repeated)
