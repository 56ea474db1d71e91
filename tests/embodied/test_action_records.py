"""A policy that has nothing in common with tokens trains: normal noise, real-valued choices, no entropy.

Its actor and critic share a trunk, its values come with its actions, and it cannot be cloned.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from runs import GRPO, digest, executor_for, iterate, tiny, train, trees
from torch import Tensor, nn

from policies.checkpoint_folder import read_folder, write_folder
from rlinf_embodied.config import PolicyConfig, TrainConfig
from rlinf_embodied.embodied.policy_check import new_policy
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import (
    Distribution,
    Evaluation,
    Features,
    ImitationPolicy,
    Noise,
    Policy,
    PolicyOutput,
    PolicySpec,
    Record,
)
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import env_spec, observed
from tests.policy_contract import require_contract

APART = (2, trees("0:1/2", "1/2:1", "1/2:1", shards=2))
TOGETHER = (1, trees("all", "all", "all"))
GAUSSIAN = ["policy=state", f"policy._target_={__name__}.Gaussian", "policy.critic=observation"]
WIDTH, STD = 16, 0.3


class Gaussian(Policy):
    """A choice for each dimension's normal; the record holds what was drawn."""

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        self.config, self.env = config, env
        noise = Noise((env.chunk, env.action_dim), Distribution.normal)
        self.spec = PolicySpec(config.name, env.chunk, env.action_dim, env.action_dim, noise)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.trunk = nn.Sequential(nn.Linear(env.proprio_dim, WIDTH), nn.Tanh())
            self.means = nn.Sequential(
                nn.Linear(WIDTH, env.chunk * env.action_dim), nn.Unflatten(1, (env.chunk, env.action_dim))
            )
            self.critic = nn.Linear(WIDTH, env.chunk)
        self.module = nn.ModuleDict({"trunk": self.trunk, "means": self.means, "critic": self.critic})

    def encode(self, observation: Observation) -> Features:
        return {"proprio": observation.proprio}

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        hidden = self.trunk(features["proprio"])
        drawn = self.means(hidden) + (0.0 if noise is None else noise * STD * temperature)
        scored = self.evaluate(features, {"drawn": drawn}, temperature)
        return PolicyOutput(drawn.clamp(-1, 1), {"drawn": drawn}, scored.log_probs, self.critic(hidden))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        hidden = self.trunk(features["proprio"])
        found = torch.distributions.Normal(self.means(hidden), STD * temperature).log_prob(record["drawn"])
        return Evaluation(found, values=self.critic(hidden))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        return self.critic(self.trunk(features["proprio"]))

    def policy_parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.means.parameters()]

    def value_parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.critic.parameters()]

    def save(self, folder: Path) -> None:
        write_folder(folder, self.config, self.env, self.module)

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Gaussian:
        saved = read_folder(folder, config)
        policy = cls(saved.config, saved.env, seed=0)
        saved.restore(policy.module)
        return policy


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    """Policies are named by dotted paths; this module is one."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


ENV = env_spec("PointReach-v0", 4, 4, 12, 2, 6, 9, 16, ())


def gaussian(*overrides: str) -> TrainConfig:
    return tiny(*GAUSSIAN, "algorithm.critic_warmup_iterations=0", *overrides)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A folder with a new policy for point_reach."""
    train(gaussian(f"run.dir={tmp_path / 'run'}", "run.num_iterations=0"))
    return tmp_path / "run/checkpoints/latest"


def weights_after(config: TrainConfig, plan: tuple[int, list[dict]], start: Path) -> tuple[str, list[dict]]:
    executor = executor_for(config, plan[1], plan[0], SerialSession(), start)
    metrics = iterate(executor, 2)
    return digest(executor), metrics


def test_it_is_no_policy_that_can_be_cloned_and_passes_the_check() -> None:
    config = gaussian().policy
    policy = new_policy(config, ENV, 0, "cpu")
    assert isinstance(policy, Policy)
    assert not isinstance(policy, ImitationPolicy)
    draw = torch.Generator().manual_seed(0)
    shown = observed(torch.randn(4, 6, generator=draw), ("reach",) * 4, None, torch.randn(4, 9, generator=draw))
    require_contract(policy, config, ENV, shown)


@pytest.mark.parametrize(("variant", "level"), [([], "token"), ([], "action"), (GRPO, "chunk")])
def test_plans_give_the_same_weights_and_ratios_begin_at_1(start, variant: list[str], level: str) -> None:
    config = gaussian(*variant, f"algorithm.ratio_level={level}", "warm_start.from_nothing=true")
    expected, metrics = weights_after(config, TOGETHER, start)
    assert weights_after(config, APART, start)[0] == expected
    for found in metrics:
        assert found["losses/initial_log_ratio"] <= 1e-5
        assert 0 <= found["losses/approx_kl"] < 1
        assert found["losses/entropy"] == 0
    assert ("losses/value_loss" in metrics[0]) is (not variant)


def test_an_entropy_bonus_without_an_entropy_is_refused(start) -> None:
    config = gaussian("warm_start.from_nothing=true", "algorithm.entropy_coef=0.01")
    with pytest.raises(
        Exception, match=r"algorithm.entropy_coef is 0.01, but .*Gaussian has no entropy in closed form"
    ):
        weights_after(config, TOGETHER, start)
