"""A small policy on the simulator's state: a teacher that learns from scratch, faster than from images.

    privileged state --without clock, standardise--> tanh network --> mean of a normal for each of the C x A actions
                                                                          |  cut into bins
                                                            logits [B, C, A, bins]

It samples the same action tokens as the vision policy, so that training is the same for both.  Its logits are those of
a normal at the centres of the bins, with one mean per state and one standard deviation overall, so that learning
generalises to neighbouring bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import KeptInFolder, seeded
from policies.critic import Criticised, Standardise, ValueHead
from rlinf_embodied.algorithms.log_probs import sample_tokens, token_log_probs
from rlinf_embodied.algorithms.log_probs import token_log_probs_and_entropy as log_probs_and_entropy
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    ImitationPolicy,
    PolicyOutput,
    Record,
    mean_of_rows,
    token_spec,
)

_FIRST_MEANS = 0.01  # scale of the last layer's initial weights: initial means are about 0


@dataclass(kw_only=True, slots=True)
class StateOptions:
    """The section policy.options."""

    num_bins: int = 33  # values per action dimension
    hidden_size: int = 256
    num_layers: int = 2
    critic_hidden_size: int = 256
    initial_std: float = 0.5  # of a new policy's actions

    def __post_init__(self) -> None:
        require_numbers(self, "policy.options", "hidden_size", "num_layers", "critic_hidden_size", low=1)
        require_numbers(self, "policy.options", "initial_std", low=0, above=True)
        require_numbers(self, "policy.options", "num_bins", low=2)


class StateNet(nn.Module):
    """All parameters: the network of means, the standard deviations, the value head."""

    centres: Tensor

    def __init__(self, options: StateOptions, env: EnvSpec, orthogonal: bool) -> None:
        """Builds the modules for an env's privileged state and chunk.

        Orthogonal initialisation decomposes each matrix: 30 s on a core for 100 million weights.
        """
        super().__init__()
        inputs, width, actions = env.privileged_dim - CLOCK_COLUMNS, options.hidden_size, env.chunk * env.action_dim
        self.privileged_scale = Standardise(env.privileged_dim)
        sizes = [inputs, *[width] * options.num_layers, actions]
        linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        for layer in linear if orthogonal else ():
            nn.init.orthogonal_(layer.weight, _FIRST_MEANS if layer is linear[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
        hidden = [part for layer in linear[:-1] for part in (layer, nn.Tanh())]
        self.means = nn.Sequential(*hidden, linear[-1], nn.Unflatten(1, (env.chunk, env.action_dim)))
        self.log_std = nn.Parameter(torch.full((env.chunk, env.action_dim), options.initial_std).log())
        self.register_buffer("centres", torch.linspace(-1.0, 1.0, options.num_bins), persistent=False)
        self.value = ValueHead(env.privileged_dim, options.critic_hidden_size)

    def logits(self, state: Tensor) -> Tensor:
        """Returns the logits [B, C, A, bins] of privileged states [B, Q]; the clock is ignored."""
        means = self.means(self.privileged_scale(state)[:, :-CLOCK_COLUMNS])
        deviations = (self.centres - means[..., None]) / self.log_std.exp()[..., None]
        return -0.5 * deviations.square()


class StatePolicy(KeptInFolder, Criticised, ImitationPolicy):
    """The policy behind the `Policy` protocol; features: "state" [B, Q], and "proprio" [B, P], which it ignores."""

    options_type: ClassVar[type[StateOptions]] = StateOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int | None) -> None:
        """Builds a policy with weights that are a function of the seed; the global generator is left as it was.

        Without a seed they are torch's defaults, to be overwritten.

        Raises:
            ConfigError: the env has cameras, or no privileged state.
        """
        _check(config, env)
        self.config, self.env = config, env
        self.options = typed(config.options, self.options_type, "policy.options")
        self.spec = token_spec(config, env)
        with seeded(seed or 0):
            net = StateNet(self.options, env, orthogonal=seed is not None)
        self.module: StateNet = net.eval()

    @classmethod
    def unloaded(cls, config: PolicyConfig, env: EnvSpec) -> Self:
        """Returns a policy whose weights are overwritten next."""
        return cls(config, env, seed=None)

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns the privileged state and proprioception."""
        assert observation.privileged is not None, "a state policy was handed an observation without privileged state"
        return {"state": observation.privileged, "proprio": observation.proprio}

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples by the inverse cumulative distribution at `noise`, uniforms (0, 1) [B, C, A]; None: greedy."""
        logits = self.module.logits(features["state"])
        tokens = logits.argmax(-1) if noise is None else sample_tokens(logits, noise, temperature)
        log_probs = token_log_probs(logits, tokens, temperature)
        return PolicyOutput(self.module.centres[tokens], {"tokens": tokens}, log_probs)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        logits = self.module.logits(features["state"])
        return Evaluation(*log_probs_and_entropy(logits, record["tokens"], temperature, entropy_gradient))

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns the network of means and the standard deviations."""
        return [*self.module.means.parameters(), self.module.log_std]

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the behaviour-cloning loss (scalar): the mean -log p of the nearest bins, summed over the B rows."""
        last = self.options.num_bins - 1
        tokens = ((actions.clamp(-1.0, 1.0) + 1.0) * (last / 2.0)).round().long()
        return mean_of_rows(-self.evaluate(features, {"tokens": tokens}, 1.0).log_probs, targets).sum()


def _check(config: PolicyConfig, env: EnvSpec) -> None:
    rule, action = f"policy.name={config.name} sees the simulator's state", "set env.cameras=[], which renders nothing"
    require(not env.cameras, "env.cameras", list(env.cameras), rule, action)
    fits, rule = env.privileged_dim > CLOCK_COLUMNS, f"{env.task} shows no state"
    require(fits, "policy.name", config.name, rule, "use a policy with cameras")
    fits, rule = config.critic is Critic.privileged, f"policy.name={config.name} has a separate critic on the state"
    require(fits, "policy.critic", config.critic.value, rule, "leave policy.critic=privileged")
