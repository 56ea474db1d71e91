"""Actor and critic on a state, on images, or on both: small networks, as usual for PPO on MuJoCo and Atari.

state [B, P] --standardise by running statistics--> tanh network --> means or logits [B, C, A]
                                                \\-> tanh network --> values [B, C]
images [B, K F, H, W, 3] --convolutions--> hidden -+-> (with the state) one layer each; trunk shared by both losses
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from policies.action_distributions import DISTRIBUTIONS
from policies.checkpoint_folder import KeptInFolder, seeded
from policies.critic import HIDDEN
from policies.running_statistics import RunningStatistics
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Evaluation, Features, Policy, PolicyOutput, PolicySpec, Record

_LIMIT = 10.0  # standard deviations at which a standardised state is clipped
_NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride: Mnih et al. 2015, on images of 84 pixels
_SMALL = ((32, 3, 2), (64, 3, 2))  # for images below 36 pixels, with padding
_NATURE_MIN_PIXELS = 36  # smallest image side that these kernels fit


@dataclass(kw_only=True, slots=True)
class ActorCriticOptions:
    """The section policy.options."""

    # gaussian, squashed_gaussian or categorical; auto: categorical for Discrete, else gaussian
    distribution: str = "auto"
    normalize_observations: bool = True  # by running statistics of the rollouts
    normalize_returns: bool = True  # the critic's output is in standard deviations of the returns so far
    use_state: bool = True  # whether a policy with cameras reads the state as well
    hidden_size: int = 64
    num_layers: int = 2
    initial_std: float = 1.0  # of a new policy's actions

    def __post_init__(self) -> None:
        require_numbers(self, "policy.options", "hidden_size", "num_layers", low=1)
        require_numbers(self, "policy.options", "initial_std", low=0, above=True)
        known, given = ("auto", *DISTRIBUTIONS), self.distribution
        require(given in known, "policy.options.distribution", given, f"it is one of {', '.join(known)}", "use auto")


class ActorCriticNet(nn.Module):
    """All parameters and statistics; features: "state" [B, D], standardised, and "images" where the env has cameras."""

    def __init__(self, env: EnvSpec, options: ActorCriticOptions, has_std: bool) -> None:
        super().__init__()
        self.has_images, self._options = bool(env.cameras), options
        self.state_dim = env.proprio_dim if options.use_state or not self.has_images else 0
        self.state_statistics = RunningStatistics(self.state_dim)
        self.return_statistics = RunningStatistics(1)
        width, inputs, hidden_layers = options.hidden_size, self.state_dim, options.num_layers
        if self.has_images:
            self.images = convolutions(3 * len(env.cameras) * env.history, env.image_sizes[0], width)
            inputs, hidden_layers = width + self.state_dim, 0
        self.actor = tanh_network(inputs, width, hidden_layers, env.chunk * env.action_dim)
        self.critic = tanh_network(inputs, width, hidden_layers, env.chunk)
        self.log_std = (
            nn.Parameter(torch.full((env.chunk, env.action_dim), options.initial_std).log()) if has_std else None
        )
        self._shape = (env.chunk, env.action_dim)
        _orthogonal(self, 2**0.5)
        nn.init.orthogonal_(_last(self.actor).weight, 0.01)
        nn.init.orthogonal_(self.last_of_critic.weight, 1.0)

    @property
    def last_of_critic(self) -> nn.Linear:
        """The critic's last layer."""
        return _last(self.critic)

    def standardised(self, state: Tensor) -> Tensor:
        """Returns the networks' input for a state [B, P]."""
        if not self.state_dim:
            return state[:, :0]
        return self.state_statistics.standardise(state, _LIMIT) if self._options.normalize_observations else state

    def hidden(self, features: Features) -> Tensor:
        """Returns the input of actor and critic, [B, D]."""
        if not self.has_images:
            return features["state"]
        images = features["images"]  # uint8 [B, K F, H, W, 3]
        pixels = images.permute(0, 1, 4, 2, 3).flatten(1, 2).to(torch.float32) / 255.0
        return torch.cat([self.images(pixels), features["state"]], 1)

    def outputs(self, hidden: Tensor) -> Tensor:
        """Returns means or logits [B, C, A]."""
        return self.actor(hidden).unflatten(1, self._shape)

    def values(self, hidden: Tensor) -> Tensor:
        """Returns V [B, C], in units of the return.

        Its gradient is that of a squared error in standard deviations of the return, so that large returns do not
        dominate the policy's loss where both share a trunk and one gradient norm.
        """
        normalised = self.critic(hidden)
        if not self._options.normalize_returns:
            return normalised
        std = self.return_statistics.std()
        unscaled = normalised / std
        return (normalised * std).detach() + (unscaled - unscaled.detach())


class ActorCritic(KeptInFolder, Policy):
    """The networks behind the `Policy` protocol; it trains from scratch, without imitation."""

    options_type = ActorCriticOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with weights that are a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: a critic on privileged state, or a distribution that does not fit the env's actions.
        """
        options = typed(config.options, ActorCriticOptions, "policy.options")
        _check(config, env, options)
        self.config, self.env, self._options = config, env, options
        default = "categorical" if env.categorical else "gaussian"
        kind = DISTRIBUTIONS[default if options.distribution == "auto" else options.distribution]
        self._distribution = kind(env.chunk, env.action_dim)
        choices, noise = self._distribution.choices, self._distribution.noise
        self.spec = PolicySpec(config.name, env.chunk, env.action_dim, choices, noise)
        with seeded(seed):
            self.module: ActorCriticNet = ActorCriticNet(env, options, self._distribution.has_std)

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns the raw and the standardised state, and the images."""
        features = {"raw_state": observation.proprio, "state": self.module.standardised(observation.proprio)}
        frames = [images.reshape(len(images), -1, *images.shape[-3:]) for images in observation.images.values()]
        return features | ({"images": torch.cat(frames, 1)} if frames else {})

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples actions and computes values."""
        net, hidden = self.module, self.module.hidden(features)
        out = net.outputs(hidden)
        drawn = self._distribution.draw(out, net.log_std, noise, temperature)
        log_probs, _ = self._distribution.scored(out, net.log_std, drawn, temperature)
        return PolicyOutput(self._distribution.actions(drawn), {"drawn": drawn}, log_probs, net.values(hidden))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy of the recorded sample, and values if actor and critic share a trunk."""
        net, hidden = self.module, self.module.hidden(features)
        scored = self._distribution.scored(
            net.outputs(hidden), net.log_std, record["drawn"], temperature, entropy_gradient
        )
        return Evaluation(*scored, values=net.values(hidden) if net.has_images else None)

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        return self.module.values(features[HIDDEN] if HIDDEN in features else self.module.hidden(features))

    def return_scale(self) -> Tensor:
        """Returns the standard deviation of the returns so far, the unit of the critic's loss."""
        std = self.module.return_statistics.std()
        return std if self._options.normalize_returns else torch.ones_like(std)

    @torch.no_grad()
    def value_features(self, features: Features) -> Features:
        return {HIDDEN: self.module.hidden(features)}

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns the actor, and the convolutions that it shares with the critic."""
        net = self.module
        log_std = [] if net.log_std is None else [net.log_std]
        return [*self._trunk(), *net.actor.parameters(), *log_std]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns the critic, and the convolutions that it shares with the actor."""
        return [*self._trunk(), *self.module.critic.parameters()]

    def _trunk(self) -> list[nn.Parameter]:
        return list(self.module.images.parameters()) if self.module.has_images else []

    def statistics_sums(self, features: Features, returns: Tensor | None) -> Tensor:
        """Returns the sums of the states, then those of the returns."""
        net = self.module
        states = features["raw_state"][:, : net.state_dim]
        of_returns = states.new_zeros(0, 1) if returns is None else returns.reshape(-1, 1)
        return torch.cat([net.state_statistics.sums(states), net.return_statistics.sums(of_returns)])

    @torch.no_grad()
    def update_statistics(self, total: Tensor) -> None:
        """Rescales the critic's last layer, too, so that its values stay the same (PopArt, arXiv:1602.07714)."""
        net = self.module
        states, returns = total.split([1 + 2 * net.state_dim, 3])
        net.state_statistics.absorb(states)
        old_std = net.return_statistics.std()
        net.return_statistics.absorb(returns)
        if self._options.normalize_returns:
            ratio = old_std / net.return_statistics.std()
            net.last_of_critic.weight.mul_(ratio)
            net.last_of_critic.bias.mul_(ratio)


def convolutions(channels: int, size: tuple[int, int], width: int) -> nn.Sequential:
    """Returns convolutions from float images [B, channels, *size] to [B, width]."""
    small, layers, in_channels = min(size) < _NATURE_MIN_PIXELS, [], channels
    for out_channels, kernel, stride in _SMALL if small else _NATURE:
        layers += [nn.Conv2d(in_channels, out_channels, kernel, stride, padding=1 if small else 0), nn.ReLU()]
        in_channels = out_channels
    with torch.no_grad():
        flat = nn.Sequential(*layers)(torch.zeros(1, channels, *size)).numel()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, width), nn.ReLU())


def tanh_network(inputs: int, width: int, hidden_layers: int, outputs: int) -> nn.Sequential:
    """Returns a tanh network from [B, inputs] to [B, outputs]."""
    sizes = [inputs, *[width] * hidden_layers]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def _last(network: nn.Sequential) -> nn.Linear:
    return cast(nn.Linear, network[-1])


def _orthogonal(module: nn.Module, gain: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(cast(Tensor, layer.bias))


def _check(config: PolicyConfig, env: EnvSpec, options: ActorCriticOptions) -> None:
    rule = "this critic sees what the actor sees"
    require(config.critic is Critic.observation, "policy.critic", config.critic.value, rule, "use observation")
    rule = f"{env.task} shows no state but an image"
    require(bool(env.cameras) or env.proprio_dim > 0, "env.cameras", list(env.cameras), rule, "use [rgb_array]")
    rule = f"{config.name} reads cameras of one size, and those of {env.task} have {list(env.image_sizes)}"
    require(len(set(env.image_sizes)) <= 1, "env.cameras", list(env.cameras), rule, "name some of one size")
    distribution = options.distribution
    rule = f"the actions of {env.task} are {'the choice of one of several' if env.categorical else 'real numbers'}"
    fits = distribution == "auto" or (distribution == "categorical") is env.categorical
    require(fits, "policy.options.distribution", distribution, rule, "use auto")
