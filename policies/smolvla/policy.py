"""The policy behind SmolVLA's network: chunks flow out of noise (policies/flow.py), with log-probs for RL.

A chain has the env's A dimensions; the network's further ones are 0, as the state's and the demonstrations' are.  An
action's velocity depends on the actions up to its own, so that a chunk of C actions is the beginning of a longer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import KeptInFolder
from policies.critic import Standardise, ValueHead
from policies.flow import Flow
from policies.smolvla.network import Prefix, SmolVLANet
from policies.smolvla.shape import SmolVLAOptions
from policies.tokenizer import WordTokenizer
from policies.vision import image_features, of_cameras
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Evaluation, Features, ImitationPolicy, PolicyOutput, Record
from rlinf_embodied.randomness import words

_FLOOR, _LIMIT = 0.01, 10.0  # least deviation that inputs are divided by; deviations beyond which they are clipped


class SmolVLAModule(nn.Module):
    """The published network, a value head, and what inputs are standardised with."""

    def __init__(self, options: SmolVLAOptions, config: PolicyConfig, env: EnvSpec) -> None:
        """Builds the modules for an env's state and a policy's critic."""
        super().__init__()
        privileged = config.critic is Critic.privileged
        self.model = SmolVLANet(options)
        self.proprio_scale = Standardise(env.proprio_dim, _LIMIT)
        self.privileged_scale = Standardise(env.privileged_dim if privileged else 0, _LIMIT)
        self.value = ValueHead(env.privileged_dim if privileged else options.expert_size, options.critic_hidden_size)


class SmolVLA(KeptInFolder, ImitationPolicy):
    """Records: "chain" float32 [B, K + 1, C, A]; policy.temperature is the size of the noise of a step.

    Features: "proprio" [B, P], "tokens" int64 [B, L], and either "vision" [B, K * T, d] (stem frozen) or the raw
    "images.<name>" of each camera.
    """

    options_type = SmolVLAOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with random weights, a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: an option breaks a rule, or the env does not suit the network.
        """
        self._options = typed(config.options, SmolVLAOptions, "policy.options")
        self._tokenizer = WordTokenizer(self._options.instruction_length)
        _check(config, env, self._options, self._tokenizer)
        self.config, self.env = config, env
        self.flow = Flow(env.chunk, env.action_dim, self._options.steps)
        self.spec, self.imitation_noise = self.flow.spec(config.name), self.flow.imitation_noise()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(words(seed, "policy")) >> 1)
            module = SmolVLAModule(self._options, config, env)
        module.model.freeze_others(module.model.trained(language=self._learns, vision=self._learns))
        self.module: SmolVLAModule = module.eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns what RL caches: the images' tokens where the eyes are frozen, else the images themselves."""
        return self.encode_frozen(observation) if self._options.freeze_stem else self.encode_trainable(observation)

    @torch.no_grad()
    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features that hold the images' tokens; the eyes get no gradient through them."""
        vision = self.module.model.see(of_cameras(image_features(observation)))
        return {"vision": vision} | self._without_images(observation)

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features that hold the images, so that the eyes run, and learn, with the rest."""
        return image_features(observation) | self._without_images(observation)

    def _without_images(self, observation: Observation) -> Features:
        tokens = self._tokenizer(observation.instruction).to(observation.proprio.device)
        return {"proprio": observation.proprio, "tokens": tokens}

    def _prefix(self, features: Features) -> Prefix:
        model = self.module.model
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._learns):
            vision = features["vision"] if "vision" in features else model.see(of_cameras(features))
            context = model.context(vision, features["tokens"])
        return model.prefix(context, self.module.proprio_scale(features["proprio"]))

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Follows the chain from `noise` [B, K + 1, C, A], of which the first is x_0; None: from 0, without noise."""
        proprio, velocity = features["proprio"], partial(self.module.model.velocity, self._prefix(features))
        return self.flow.act(velocity, len(proprio), proprio.device, noise, temperature)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs [B, C, K] of the steps of a "chain"; the size of its noise is given, so no entropy is."""
        velocity = partial(self.module.model.velocity, self._prefix(features))
        return self.flow.evaluate(velocity, record["chain"], temperature)

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C]; `privileged` is [B, C, Q].

        A critic on observations reads the expert's hidden states of a chunk of zeros at the time of data, without a
        gradient: the value loss trains its head only.
        """
        if self.config.critic is Critic.privileged:
            assert privileged is not None, "a privileged critic was handed no privileged state"
            return self.module.value(self.module.privileged_scale(privileged))
        proprio = features["proprio"]
        with torch.no_grad():
            empty = proprio.new_zeros(len(proprio), self.spec.chunk, self._options.max_action_dim)
            hidden = self.module.model.hidden(self._prefix(features), empty, empty.new_zeros(len(proprio)))
        return self.module.value(hidden)

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL: the expert and the projections around it, and what else may learn.

        Without policy.options.expert_only that is the language model, and without policy.options.freeze_stem the eyes.
        """
        return self._trained(vision=not self._options.freeze_stem)

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the value head."""
        return list(self.module.value.parameters())

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains; without policy.options.expert_only, the eyes, too, if it is the whole policy."""
        return self._trained(vision=whole)

    def _trained(self, vision: bool) -> list[nn.Parameter]:
        return self.module.model.trained(language=self._learns, vision=self._learns and vision)

    @property
    def _learns(self) -> bool:
        """Whether more than the expert does."""
        return not self._options.expert_only

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets what "proprio" [P] or, with a privileged critic, "privileged" [Q] is standardised with."""
        scale = getattr(self.module, f"{name}_scale", None)
        if scale is not None and scale.mean.numel() > 0:
            scale.set(mean, std, _FLOOR)

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed flow-matching loss over the B rows (scalar): |v - (x_1 - x_0)|^2, a mean over C * A.

        Args:
            features: of B rows.
            actions: x_1, float32 [B, C, A] in [-1, 1].
            targets: "noise" [B, C * A + 1]: x_0, and what decides t in [0, 1].
        """
        velocity = partial(self.module.model.velocity, self._prefix(features))
        return self.flow.matching_loss(velocity, targets["noise"], actions).sum()


def _check(config: PolicyConfig, env: EnvSpec, options: SmolVLAOptions, tokenizer: WordTokenizer) -> None:
    if not env.cameras:
        raise ConfigError(
            f"env.cameras is empty, but policy.name={config.name} sees: name at least one camera, or "
            "use policy=state, which acts on the state"
        )
    if config.critic is Critic.privileged and env.privileged_dim == 0:
        raise ConfigError(
            f"policy.critic is {config.critic.value}, but {env.task} shows no privileged state: "
            "set policy.critic=observation"
        )
    sizes = {
        "max_state_dim": (env.proprio_dim, f"numbers in the state of {env.task}"),
        "max_action_dim": (env.action_dim, f"numbers in an action of {env.task}"),
        "vocab_size": (tokenizer.size, "word tokens"),
    }
    for name, (needed, what) in sizes.items():
        value, rule = getattr(options, name), f"there are {needed} {what}"
        require(value >= needed, f"policy.options.{name}", value, rule, f"use {needed} or more")
