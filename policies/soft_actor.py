"""The policy of soft actor-critic: tanh of a normal whose mean and standard deviation a network predicts.

state [B, P] -> ReLU network -+-> mean [B, C, A]
                              +-> log of the standard deviation [B, C, A], clamped
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from policies.action_distributions import SquashedGaussian
from policies.checkpoint_folder import KeptInFolder, seeded
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    ImitationPolicy,
    PolicyOutput,
    PolicySpec,
    Record,
    ReparameterizedPolicy,
    mean_of_rows,
)

_MAX_ACTION = 1 - 1e-5  # actions at the bounds have no density
_LOG_STD = (-20.0, 2.0)  # bounds of Haarnoja et al.


@dataclass(kw_only=True, slots=True)
class SoftActorOptions:
    """The section policy.options."""

    hidden_size: int = 256
    num_layers: int = 2

    def __post_init__(self) -> None:
        require_numbers(self, "policy.options", "hidden_size", "num_layers", low=1)


class SoftActorNet(nn.Module):
    """All parameters: `num_layers` hidden layers of `hidden_size`, and two last layers."""

    def __init__(self, options: SoftActorOptions, env: EnvSpec) -> None:
        super().__init__()
        sizes = [env.proprio_dim, *[options.hidden_size] * options.num_layers]
        self.trunk = nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())))
        self.mean = nn.Linear(sizes[-1], env.chunk * env.action_dim)
        self.log_std = nn.Linear(sizes[-1], env.chunk * env.action_dim)
        self._shape = (env.chunk, env.action_dim)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns means and logarithms of standard deviations, each [B, C, A]."""
        hidden = self.trunk(state)
        return (
            self.mean(hidden).unflatten(1, self._shape),
            self.log_std(hidden).clamp(*_LOG_STD).unflatten(1, self._shape),
        )


class SoftActor(KeptInFolder, ReparameterizedPolicy, ImitationPolicy):
    """The network behind the protocols; features: "state" [B, P].  The learner has the critics."""

    options_type = SoftActorOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with weights that are a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: the env's actions are choices, or it shows images or no state.
        """
        options = typed(config.options, SoftActorOptions, "policy.options")
        rule = f"the actions of {env.task} are the choice of one of several, and this policy's are real numbers"
        require(not env.categorical, "policy.name", config.name, rule, "use policy=actor_critic with train_vla.py")
        rule = f"{config.name} acts on a state alone"
        require(not env.cameras, "env.cameras", list(env.cameras), rule, "use env.cameras=[]")
        rule = f"{config.name} acts on a state, and {env.task} shows none"
        require(env.proprio_dim > 0, "env.task", env.task, rule, "use another env")
        self.config, self.env, self.state_dim = config, env, env.proprio_dim
        self._distribution = SquashedGaussian(env.chunk, env.action_dim)
        noise = self._distribution.noise
        self.spec = PolicySpec(config.name, env.chunk, env.action_dim, env.action_dim, noise)
        with seeded(seed):
            self.module: SoftActorNet = SoftActorNet(options, env)

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        return {"state": observation.proprio}

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples actions; greedy ones are the tanh of the mean."""
        mean, log_std = self.module(features["state"])
        drawn = self._distribution.draw(mean, log_std, noise, temperature)
        log_probs, _ = self._distribution.scored(mean, log_std, drawn, temperature)
        return PolicyOutput(self._distribution.actions(drawn), {"drawn": drawn}, log_probs)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        mean, log_std = self.module(features["state"])
        return Evaluation(*self._distribution.scored(mean, log_std, record["drawn"], temperature, entropy_gradient))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns zeros [B, C], since the learner has the critics."""
        return features["state"].new_zeros(len(features["state"]), self.spec.chunk)

    # ------------------------------------------------------------------------------------------------------- training
    def sample(self, features: Features, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.module(features["state"])
        actions, log_probs = self._distribution.reparameterized(mean, log_std, noise)
        return actions, log_probs.sum(-1)

    def log_density(self, features: Features, actions: Tensor) -> Tensor:
        """Returns the log-density of actions; those at the bounds are moved just inside, see ReparameterizedPolicy."""
        mean, log_std = self.module(features["state"])
        drawn = actions.clamp(-_MAX_ACTION, _MAX_ACTION).atanh()
        return self._distribution.scored(mean, log_std, drawn, 1.0)[0].sum(-1)

    def policy_parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        return []

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed squared error of greedy actions, a mean over the C x A entries of an action."""
        mean, _ = self.module(features["state"])
        return mean_of_rows((mean.tanh() - actions).square(), targets).sum()
