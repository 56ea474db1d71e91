"""What the state policy promises: the protocol, exact log-probs, a head that knows neighbours, no look at the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from policies.state_policy import StatePolicy
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, Observation
from tests.observations import env_spec, observed

ENV = env_spec("PushCube-v1", 16, 2, 50, 3, 19, 12, 64, ())
CONFIG = PolicyConfig(
    _target_="policies.state_policy.StatePolicy", name="state", options={"hidden_size": 16, "num_bins": 9}
)
ROWS, SHAPE = 8, (8, 2, 3)


@pytest.fixture(scope="module")
def policy() -> StatePolicy:
    return StatePolicy(CONFIG, ENV, seed=3)


def observe(seed: int = 0) -> Observation:
    drawn = torch.Generator().manual_seed(seed)
    state = torch.randn(ROWS, 12, generator=drawn)
    return observed(torch.randn(ROWS, 19, generator=drawn), ("push",) * ROWS, None, state)


def test_new_actions_are_spread_about_zero_as_far_as_was_asked_for() -> None:
    wide = StatePolicy(replace(CONFIG, options={"hidden_size": 16, "num_bins": 101, "initial_std": 0.3}), ENV, seed=0)
    every = torch.linspace(-1, 1, 101)
    features = wide.encode(observe())
    p = torch.stack(
        [wide.evaluate(features, {"tokens": torch.full(SHAPE, v)}, 1.0).log_probs for v in range(101)], -1
    ).exp()
    assert torch.allclose((p * every).sum(-1), torch.zeros(SHAPE), atol=0.05)
    assert torch.allclose((p * every.square()).sum(-1).sqrt(), torch.full(SHAPE, 0.3), atol=0.01)


def test_the_clock_reaches_the_critic_but_not_the_policy(policy: StatePolicy) -> None:
    seen = observe()
    assert seen.privileged is not None
    later = seen.privileged.clone()
    later[:, -CLOCK_COLUMNS:] += 1
    tokens = torch.zeros(SHAPE, dtype=torch.long)
    first = policy.evaluate(policy.encode(seen), {"tokens": tokens}, 1.0).log_probs
    assert torch.equal(
        first, policy.evaluate(policy.encode(replace(seen, privileged=later)), {"tokens": tokens}, 1.0).log_probs
    )
    policy.module.value.layers[-1].weight.data.fill_(1.0)  # an untrained critic says 0
    assert not torch.equal(policy.value({}, seen.privileged[:, None]), policy.value({}, later[:, None]))


@pytest.mark.parametrize(
    ("config", "env", "words"),
    [
        (
            CONFIG,
            env_spec("PushCube-v1", 16, 2, 50, 3, 19, 12, 64, ("base_camera",)),
            r"env.cameras is \['base_camera'\], .* set env.cameras=\[\]",
        ),
        (CONFIG, replace(ENV, features=ENV.features[:-1]), "PushCube-v1 shows no state"),
        (replace(CONFIG, critic=Critic.observation), ENV, "leave policy.critic=privileged"),
    ],
)
def test_what_it_cannot_see_is_refused(config: PolicyConfig, env: EnvSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StatePolicy(config, env, 0)
