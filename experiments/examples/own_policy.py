"""A custom policy: a small network on the proprioception that chooses among bins of each action.

docs/own_policy.md explains it; own_policy.yaml next to it is the section `policy` of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import KeptInFolder
from policies.critic import Standardise
from rlinf_embodied.algorithms.log_probs import sample_tokens, token_log_probs, token_log_probs_and_entropy
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Evaluation, Features, ImitationPolicy, PolicyOutput, Record, token_spec


@dataclass(kw_only=True, slots=True)
class Options:
    """What the section policy.options may hold."""

    num_bins: int = 11  # values per action dimension
    width: int = 64


class ProprioPolicy(KeptInFolder, ImitationPolicy):
    """Two networks on the proprioception: logits of a chunk's actions, and the value before each of them."""

    options_type = Options

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Draws its weights from the seed, and leaves the global generator as it was."""
        self.config, self.env = config, env
        self.spec = token_spec(config, env)
        self.options = typed(config.options, Options, "policy.options")
        width, num_bins = self.options.width, self.options.num_bins
        self._scale = Standardise(env.proprio_dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._actor = network(env.proprio_dim, width, env.chunk, env.action_dim, num_bins)
            self._critic = network(env.proprio_dim, width, env.chunk)
        self.module = nn.ModuleDict({"proprio_scale": self._scale, "actor": self._actor, "critic": self._critic})

    def encode(self, observation: Observation) -> Features:
        """Returns what the other methods read: the standardised proprioception [B, P]."""
        return {"proprio": self._scale(observation.proprio)}

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Chooses the likeliest bins, or those at which the cumulative distribution passes `noise`."""
        logits = self._actor(features["proprio"])  # [B, C, A, bins]
        tokens = logits.argmax(-1) if noise is None else sample_tokens(logits, noise, temperature)
        actions = tokens * (2.0 / (self.options.num_bins - 1)) - 1.0
        return PolicyOutput(actions, {"tokens": tokens}, token_log_probs(logits, tokens, temperature))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy of bins that were chosen."""
        logits = self._actor(features["proprio"])
        return Evaluation(*token_log_probs_and_entropy(logits, record["tokens"], temperature, entropy_gradient))

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action; policy.critic=observation says that it reads features."""
        return self._critic(features["proprio"])

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains."""
        return list(self._actor.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains."""
        return list(self._critic.parameters())

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Takes the mean and standard deviation of observations under random actions."""
        if name == "proprio":
            self._scale.set(mean, std)


def network(inputs: int, width: int, *outputs: int) -> nn.Sequential:
    """Returns a tanh network from [B, inputs] to [B, *outputs], whose first outputs are near 0."""
    size = int(torch.tensor(outputs).prod())
    last = nn.Linear(width, size)
    nn.init.zeros_(last.bias)
    nn.init.normal_(last.weight, std=0.01)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last, nn.Unflatten(1, outputs)
    )
