"""A custom policy: keypoints in every camera, normal distributions of actions; cloned, or trained from scratch.

docs/own_policy.md explains it; own_policy.yaml next to it is the section `policy` of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.action_distributions import Gaussian
from policies.checkpoint_folder import KeptInFolder, seeded
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

    width: int = 64  # channels of the convolutions; hidden layers have four times as many units
    std: float = 0.2  # of the actions with which RL begins; cloning leaves it as it is


class OwnPolicy(KeptInFolder, Standardises, ImitationPolicy):
    """Images and proprioception -> the means of a chunk's actions, and the value before each of them."""

    options_type = Options
    module: Any  # whose parts have types of their own

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Draws its weights from the seed, and leaves the global generator as it was."""
        self.config, self.env, self.options = config, env, typed(config.options, Options, "policy.options")
        self._normal, width = Gaussian(env.chunk, env.action_dim), self.options.width
        self.spec = PolicySpec(config.name, env.chunk, env.action_dim, self._normal.choices, self._normal.noise)
        self.module, seen = nn.Module(), 2 * width * len(env.cameras)
        with seeded(seed):
            self.module.eyes = nn.ModuleList(Eye(width) for _ in env.cameras)
            self.module.object = nn.Linear(seen, 3) if seen else nn.Identity()
            self.module.actor = head(env.proprio_dim + seen, 4 * width, env.chunk, env.action_dim)
            self.module.critic = head(env.proprio_dim + seen, 4 * width, env.chunk)
        self.module.proprio_scale = Standardise(env.proprio_dim)
        self._log_std = self.module.log_std = nn.Parameter(torch.full(self._normal.noise.shape, self.options.std).log())

    def encode(self, observation: Observation) -> Features:
        """Returns what the others read: images uint8 [B, H, W, 3], and the proprioception [B, P] in its own units."""
        return {"proprio": observation.proprio, **observation.images}

    def _hidden(self, features: Features) -> Tensor:
        seen = [eye(features[name]) for eye, name in zip(self.module.eyes, self.env.cameras, strict=True)]
        return torch.cat([self.module.proprio_scale(features["proprio"]), *seen], 1)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Chooses mean + noise * std * temperature; without noise the mean.  The record is not clipped, actions are."""
        means = self.module.actor(self._hidden(features))
        drawn = self._normal.draw(means, self._log_std, noise, temperature)
        log_probs, _ = self._normal.scored(means, self._log_std, drawn, temperature)
        return PolicyOutput(self._normal.actions(drawn), {"drawn": drawn}, log_probs)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy [B, C, A] of what was drawn: each number of an action is a choice."""
        means = self.module.actor(self._hidden(features))
        return Evaluation(*self._normal.scored(means, self._log_std, record["drawn"], temperature, entropy_gradient))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, of features (policy.critic=observation) and without a gradient for the eyes."""
        return self.module.critic(self._hidden(features).detach())

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains."""
        return [*self.module.eyes.parameters(), *self.module.actor.parameters(), self._log_std]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains."""
        return list(self.module.critic.parameters())

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains; nothing is frozen, so the whole is all there is."""
        return [*self.module.eyes.parameters(), *self.module.object.parameters(), *self.module.actor.parameters()]

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the absolute error of the means, a mean over the numbers of a chunk, summed over the B rows."""
        hidden = self._hidden(features)
        loss = mean_of_rows((self.module.actor(hidden) - actions).abs(), targets).sum()
        if self.env.cameras and "object_position" in targets:  # in metres; it teaches the eyes what to look for
            error = self.module.object(hidden[:, self.env.proprio_dim :]) - targets["object_position"] * 10.0
            loss = loss + error.square().mean(1).sum()
        return loss


class Eye(nn.Module):
    """Convolutions, and where on their maps each keypoint is (spatial softmax, arXiv:1504.00702)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.Sequential()  # group norm keeps rows independent
        for before, after, stride in ((3, width // 2, 2), (width // 2, width, 2), (width, width, 2), (width, width, 1)):
            self.maps.extend([nn.Conv2d(before, after, 3, stride, padding=1), nn.GroupNorm(4, after), nn.GELU()])
        self.keypoints = nn.Conv2d(width, width // 2, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Maps uint8 [B, H, W, 3] to the means of the maps and the places of keypoints in [-1, 1], [B, 2 * width]."""
        maps = self.maps(images.permute(0, 3, 1, 2) / 127.5 - 1.0)
        where = self.keypoints(maps).flatten(2).softmax(2).unflatten(2, maps.shape[2:])
        down, across = (torch.linspace(-1.0, 1.0, size, device=maps.device) for size in maps.shape[2:])
        return torch.cat([maps.mean((2, 3)), (where.sum(2) * across).sum(2), (where.sum(3) * down).sum(2)], 1)


def head(inputs: int, width: int, *outputs: int) -> nn.Sequential:
    """Returns a network from [B, inputs] to [B, *outputs]."""
    layers = [nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, torch.Size(outputs).numel()), nn.Unflatten(1, outputs))
