"""A custom policy: convolutions on every camera, normal distributions of actions; cloned, or trained from scratch.

docs/own_policy.md explains it; own_policy.yaml next to it is the section `policy` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.action_distributions import Gaussian
from policies.checkpoint_folder import KeptInFolder
from policies.critic import Standardise, Standardises
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    ImitationPolicy,
    PolicyOutput,
    PolicySpec,
    Record,
    mean_of_rows,
)


@dataclass(kw_only=True, slots=True)
class Options:
    """What the section policy.options may hold."""

    width: int = 128
    std: float = 0.2  # of the actions with which RL begins; cloning leaves it as it is


class OwnPolicy(KeptInFolder, Standardises, ImitationPolicy):
    """Images and proprioception -> the means of a chunk's actions, and the value before each of them."""

    options_type = Options

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Draws its weights from the seed, and leaves the global generator as it was."""
        self.config, self.env = config, env
        self.options = typed(config.options, Options, "policy.options")
        self._normal, width = Gaussian(env.chunk, env.action_dim), self.options.width
        self.spec = PolicySpec(config.name, env.chunk, env.action_dim, self._normal.choices, self._normal.noise)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._eyes = nn.ModuleList(eye(height, width_, width) for height, width_ in env.image_sizes)
            seen = env.proprio_dim + width * len(self._eyes)
            self._actor = head(seen, width, env.chunk, env.action_dim)
            self._critic = head(seen, width, env.chunk)
        self._scale = Standardise(env.proprio_dim)
        parts = {"eyes": self._eyes, "actor": self._actor, "critic": self._critic, "proprio_scale": self._scale}
        self.module = nn.ModuleDict(parts)
        self._log_std = nn.Parameter(torch.full((env.chunk, env.action_dim), self.options.std).log())
        self.module.register_parameter("log_std", self._log_std)

    def encode(self, observation: Observation) -> Features:
        """Returns what the others read: images uint8 [B, H, W, 3], and the standardised proprioception [B, P]."""
        return {"proprio": self._scale(observation.proprio), **observation.images}

    def _hidden(self, features: Features) -> Tensor:
        images = [features[name].permute(0, 3, 1, 2) / 255.0 for name in self.env.cameras]
        return torch.cat([features["proprio"], *(eye(x) for eye, x in zip(self._eyes, images, strict=True))], 1)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Chooses mean + noise * std * temperature; without noise the mean.  The record is not clipped, actions are."""
        means = self._actor(self._hidden(features))
        drawn = self._normal.draw(means, self._log_std, noise, temperature)
        log_probs, _ = self._normal.scored(means, self._log_std, drawn, temperature)
        return PolicyOutput(self._normal.actions(drawn), {"drawn": drawn}, log_probs)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy [B, C, A] of what was drawn: each number of an action is a choice."""
        means = self._actor(self._hidden(features))
        return Evaluation(*self._normal.scored(means, self._log_std, record["drawn"], temperature, entropy_gradient))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, of features (policy.critic=observation) and without a gradient for the eyes."""
        return self._critic(self._hidden(features).detach())

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains."""
        return [*self.imitation_parameters(whole=True), self._log_std]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains."""
        return list(self._critic.parameters())

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains; nothing is frozen, so the whole is all there is."""
        return [*self._eyes.parameters(), *self._actor.parameters()]

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the squared error of the means: a mean over the numbers of a chunk, a sum over the B rows."""
        return mean_of_rows((self._actor(self._hidden(features)) - actions).square(), targets).sum()


def eye(height: int, width: int, outputs: int) -> nn.Sequential:
    """Returns convolutions from [B, 3, height, width] to [B, outputs]; group norm keeps rows independent."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * -(-height // 8) * -(-width // 8), outputs), nn.ReLU())


def head(inputs: int, width: int, *outputs: int) -> nn.Sequential:
    """Returns a network from [B, inputs] to [B, *outputs]."""
    last = nn.Linear(width, int(torch.tensor(outputs).prod()))
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), last, nn.Unflatten(1, outputs))
