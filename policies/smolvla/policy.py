"""The policy behind SmolVLA's network: chunks flow out of noise (policies/flow.py), with log-probs for RL.

A chain has the env's A dimensions; the network's further ones are 0, as the state's and the demonstrations' are.  An
action's velocity depends on the actions up to its own, so that a chunk of C actions is the beginning of a longer one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import seeded
from policies.critic import Standardise, ValueHead
from policies.flow import ActsByFlow, Flow, Velocity
from policies.smolvla.network import Prefix, SmolVLANet
from policies.smolvla.shape import SmolVLAOptions
from policies.tokenizer import WordTokenizer
from policies.vision import VisionPolicy, of_cameras, require_seen
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Features


class SmolVLAModule(nn.Module):
    """The published network, a value head, and what inputs are standardised with."""

    def __init__(self, options: SmolVLAOptions, config: PolicyConfig, env: EnvSpec) -> None:
        """Builds the modules for an env's state and a policy's critic."""
        super().__init__()
        privileged = config.critic is Critic.privileged
        self.model = SmolVLANet(options)
        self.proprio_scale = Standardise(env.proprio_dim)
        self.privileged_scale = Standardise(env.privileged_dim if privileged else 0)
        self.value = ValueHead(env.privileged_dim if privileged else options.expert_size, options.critic_hidden_size)


class SmolVLA(ActsByFlow, VisionPolicy):
    """The policy behind the `Policy` protocol; frozen eyes give "vision" [B, K * T, d]."""

    options_type = SmolVLAOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with random weights, a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: an option breaks a rule, or the env does not suit the network.
        """
        self.options = typed(config.options, SmolVLAOptions, "policy.options")
        self._tokenizer = WordTokenizer(self.options.instruction_length)
        _check(config, env, self.options, self._tokenizer)
        self.config, self.env = config, env
        self.flow = Flow(env.chunk, env.action_dim, self.options.steps)
        self.spec, self.imitation_noise = self.flow.spec(config.name), self.flow.imitation_noise()
        with seeded(seed):
            module = SmolVLAModule(self.options, config, env)
        module.model.freeze_others(module.model.trained(language=self._learns, vision=self._learns))
        self.module: SmolVLAModule = module.eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def _seen(self, images: Features) -> Features:
        return {"vision": self.module.model.see(of_cameras(images))}

    def _prefix(self, features: Features) -> Prefix:
        model = self.module.model
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._learns):
            vision = features["vision"] if "vision" in features else model.see(of_cameras(features))
            context = model.context(vision, features["tokens"])
        return model.prefix(context, self.module.proprio_scale(features["proprio"]))

    def _velocity(self, features: Features) -> Velocity:
        return partial(self.module.model.velocity, self._prefix(features))

    def _hidden(self, features: Features) -> Tensor:
        """Returns the expert's hidden states of a chunk of zeros at the time of data."""
        proprio = features["proprio"]
        empty = proprio.new_zeros(len(proprio), self.spec.chunk, self.options.max_action_dim)
        return self.module.model.hidden(self._prefix(features), empty, empty.new_zeros(len(proprio)))

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL: the expert and the projections around it, and what else may learn.

        Without policy.options.expert_only that is the language model, and without policy.options.freeze_stem the eyes.
        """
        return self._trained(vision=not self.options.freeze_stem)

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains; without policy.options.expert_only, the eyes, too, if it is the whole policy."""
        return self._trained(vision=whole)

    def _trained(self, vision: bool) -> list[nn.Parameter]:
        return self.module.model.trained(language=self._learns, vision=self._learns and vision)

    @property
    def _learns(self) -> bool:
        """Whether more than the expert does."""
        return not self.options.expert_only


def _check(config: PolicyConfig, env: EnvSpec, options: SmolVLAOptions, tokenizer: WordTokenizer) -> None:
    require_seen(config, env)
    sizes = {
        "max_state_dim": (env.proprio_dim, f"numbers in the state of {env.task}"),
        "max_action_dim": (env.action_dim, f"numbers in an action of {env.task}"),
        "vocab_size": (tokenizer.size, "word tokens"),
    }
    for name, (needed, what) in sizes.items():
        value, rule = getattr(options, name), f"there are {needed} {what}"
        require(value >= needed, f"policy.options.{name}", value, rule, f"use {needed} or more")
