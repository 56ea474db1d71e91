"""OpenVLA and OpenVLA-OFT behind the `Policy` protocol.

images of K cameras --image processor--> [B, K, S, S, 3] --normalise--> pixel values --network--> hidden [B, N, D]
instruction --prompt, fixed width--> ids [B, L]                                                       |
                                                                 tokens of actions <--action columns--+--> values
tokens --bins--> [-1, 1] --range of the data set--> the robot's action --gripper, clip--> [-1, 1] of the env

A critic on privileged state is a separate head; one on observations reads the hidden state that predicts the first
token, and shares the network with the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from policies.adapters import inject_adapters
from policies.checkpoint_folder import seeded
from policies.critic import Standardise, ValueHead
from policies.openvla.actions import OFT_EPSILON, ActionTokens, range_of, require_dim
from policies.openvla.config import OPTIONS, Decoding, Gripper, Head, OpenVLAOptions
from policies.openvla.decoding import TokenDistribution, action_log_probs, decode, predicting_states
from policies.openvla.folder import Checkpoint, read_checkpoint, read_described, read_oft, read_parts, write_policy
from policies.openvla.images import read_processor
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.prompt import PromptTokenizer, TokenRows
from rlinf_embodied.config import Critic, PolicyConfig, Precision
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import CheckpointError, ConfigError, ObjectiveError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    ImitationPolicy,
    PolicyOutput,
    Record,
    token_spec,
)
from rlinf_embodied.learning.gradients import checkpoint_blocks


class OpenVLAModule(nn.Module):
    """All parameters: the network with OFT's parts, and a critic."""

    def __init__(self, model: OpenVLAOFT, critic: nn.Module, privileged_dim: int) -> None:
        super().__init__()
        self.model, self.critic = model, critic
        self.privileged_scale = Standardise(privileged_dim)


class OpenVLAPolicy(ImitationPolicy):
    """Features: "images" uint8 [B, K, S, S, 3], "ids" int64 and "present" bool [B, L], "proprio" [B, P] if it is read.

    The record holds "tokens", ids of the vocabulary, int64 [B, C, A].
    """

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Refuses: there is no network without a folder.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"policy.name is {config.name!r}, which begins with the network of a folder: give an OpenVLA folder as "
            "warm_start.checkpoint=<dir>; experiments/examples/small_openvla.py makes a "
            "small one with random weights"
        )

    reads_published = True
    options_type = OpenVLAOptions

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> OpenVLAPolicy:
        """See Policy; published folders need `env` and `config`.

        Raises:
            CheckpointError: see `read_oft`, `read_described` and `read_parts`.
            ConfigError: options that are unknown, or do not fit the folder or the env.
        """
        config, env = read_described(folder, env, config)
        options = typed(config.options, OpenVLAOptions, OPTIONS)
        dtype = torch.bfloat16 if options.precision is Precision.bfloat16 else torch.float32
        _require_env(env, options)
        if options.decoding is Decoding.autoregressive:
            checkpoint = read_checkpoint(folder, dtype)
            model = OpenVLAOFT(checkpoint.network, 1, env.action_dim)
        else:
            checkpoint, model = read_oft(folder, options, env.chunk, dtype)
        policy = cls.__new__(cls)
        policy._build(config, env, options, checkpoint, model)
        read_parts(folder, policy.module, bool(options.lora.rank))
        return policy

    def _build(
        self, config: PolicyConfig, env: EnvSpec, options: OpenVLAOptions, checkpoint: Checkpoint, model: OpenVLAOFT
    ) -> None:
        self.config, self.env, self.options, self.checkpoint = config, env, options, checkpoint
        statistics, key = checkpoint.statistics, options.unnorm_key
        self.range = range_of(statistics, key, scaling=options.scaling)
        require_dim(self.range, env.action_dim, key)
        projector = model.proprio_projector
        if projector is not None and projector.proprio_dim != env.proprio_dim:
            raise CheckpointError(
                f"the checkpoint reads a proprioception of {projector.proprio_dim} dimensions, but {env.task} shows "
                f"{env.proprio_dim}: set {OPTIONS}.proprio=false, or give a checkpoint that was trained on this robot"
            )
        self._proprio_range = range_of(statistics, key, "proprio", options.scaling) if options.proprio else None
        self.spec = token_spec(config, env)
        self._tokens = ActionTokens.of(checkpoint.config)
        self._processor = read_processor(checkpoint.folder, checkpoint.config)
        self._tokenizer = PromptTokenizer(checkpoint.folder, checkpoint.config.pad_token_id)
        self._prompts: dict[str, TokenRows] = {}
        if options.lora.rank:
            towers = model.network.vision_backbone
            still = [towers] if options.freeze_vision else towers.unread()
            inject_adapters(model, options.lora, 0, f"{OPTIONS}.lora", without_gradient=still)
        if options.freeze_vision:
            model.network.vision_backbone.requires_grad_(False)
        if options.checkpoint_activations:
            checkpoint_blocks(model.network.blocks())
        self.module: OpenVLAModule = OpenVLAModule(model, self._critic(model), env.privileged_dim).eval()

    def _critic(self, model: OpenVLAOFT) -> nn.Module:
        """Returns a value head, with weights that are the same each time."""
        config, env = self.config, self.env
        with seeded(0, "critic"):
            if config.critic is Critic.privileged:
                return ValueHead(env.privileged_dim, self.options.critic_hidden_size)
            return _ChunkValueHead(model.network.dim, self.options.critic_hidden_size, env.chunk)

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns what the network reads, in the size in which it reads it."""
        assert observation.images, "a vision policy was handed an observation without images"
        device = observation.proprio.device
        prompts = [self._prompt(text) for text in observation.instruction]
        features = {
            "images": torch.stack([self._squared(images) for images in observation.images.values()], 1),
            "ids": torch.cat([rows.ids for rows in prompts]).to(device),
            "present": torch.cat([rows.present for rows in prompts]).to(device),
        }
        if self._proprio_range is not None:
            state = self._proprio_range.normalise(observation.proprio.cpu().numpy())
            features["proprio"] = torch.from_numpy(state).to(torch.float32).to(device)
        return features

    def _prompt(self, instruction: str) -> TokenRows:
        if instruction not in self._prompts:
            self._prompts[instruction] = self._tokenizer.row(instruction, self.options.prompt_length)
        return self._prompts[instruction]

    def _squared(self, images: Tensor) -> Tensor:
        """Returns a camera's images [B, H, W, 3] as [B, S, S, 3], as the folder's image processor does it."""
        size = self._processor.image_size
        if images.shape[1:3] == (size, size):
            return images
        squared = np.stack([self._processor.squared(image) for image in images.cpu().numpy()])
        return torch.from_numpy(squared).to(images.device)

    def _inputs(self, features: Features) -> tuple[TokenRows, Tensor, Tensor | None]:
        rows = TokenRows(features["ids"], features["present"])
        return rows, self._processor.normalised(features["images"]), features.get("proprio")

    def _distribution(self, temperature: float) -> TokenDistribution:
        columns = None if self.options.whole_vocabulary else self.checkpoint.config.action_columns
        return TokenDistribution(temperature=temperature, columns=columns, top_k=self.options.top_k)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Draws tokens by uniforms [B, C, A]; None: the likeliest."""
        rows, pixels, proprio = self._inputs(features)
        model, shape = self.module.model, (len(pixels), self.spec.chunk, self.spec.action_dim)
        if self.options.head is Head.l1:
            return self._regressed(model.regress(rows, pixels, proprio), noise)
        distribution = self._distribution(temperature)
        uniforms = None if noise is None else noise.flatten(1)
        if self.options.decoding is Decoding.autoregressive:
            done = decode(model.network, rows, pixels, self.spec.action_dim, distribution, uniforms)
        else:
            stop = self.options.stop_token
            done = model.decode(rows, pixels, distribution, uniforms, proprio, stop)
        tokens = done.tokens.view(shape)
        values = self._values(done.hidden) if self.config.critic is Critic.observation else None
        actions = self._robot(self._tokens.decode(tokens.cpu().numpy())).to(tokens.device)
        return PolicyOutput(actions, {"tokens": tokens}, done.log_probs.view(shape), values)

    def _regressed(self, normalised: Tensor, noise: Tensor | None) -> PolicyOutput:
        if noise is not None:
            self._require_log_probs()
        actions = self._robot(normalised.float().cpu().numpy()).to(normalised.device)
        nothing = torch.zeros_like(actions)
        return PolicyOutput(actions, {"actions": actions}, nothing)

    def _robot(self, normalised: np.ndarray) -> Tensor:
        """Returns normalised actions [..., A] as what the env takes, float32 in [-1, 1]."""
        epsilon = 0.0 if self.options.decoding is Decoding.autoregressive else OFT_EPSILON
        actions = self.range.expand(normalised, epsilon)
        if self.options.gripper is not Gripper.as_it_is:
            sign = 1.0 if self.options.gripper is Gripper.binary else -1.0
            actions[..., -1] = np.where(actions[..., -1] > 0.5, sign, -sign)
        return torch.from_numpy(actions.clip(-1.0, 1.0)).to(torch.float32)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy [B, C, A] of given "tokens", and values where the critic reads the network."""
        tokens = record["tokens"].flatten(1)
        hidden = self._hidden(features, tokens)
        network = self.module.model.network
        log_probs, entropy = action_log_probs(hidden, network.output_layer, tokens, self._distribution(temperature))
        shape = record["tokens"].shape
        values = self._values(hidden) if self.config.critic is Critic.observation else None
        return Evaluation(log_probs.view(shape), entropy.view(shape), values)

    def _hidden(self, features: Features, tokens: Tensor) -> Tensor:
        """Returns the states [B, C * A, D] that predict tokens [B, C * A]."""
        self._require_log_probs()
        rows, pixels, proprio = self._inputs(features)
        if self.options.decoding is Decoding.autoregressive:
            return predicting_states(self.module.model.network, rows, pixels, tokens)
        return self.module.model.hidden(rows, pixels, proprio, self.options.stop_token)

    def _require_log_probs(self) -> None:
        if self.options.head is Head.l1:
            raise ObjectiveError(
                "head is l1, but RL needs log-probs, which a regressed action does not have, and it would train a "
                "token head that nothing reads: use head=discrete for RL; l1 can be evaluated"
            )

    def _values(self, hidden: Tensor) -> Tensor:
        return self.module.critic(hidden[:, 0].float())

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        if self.config.critic is Critic.privileged:
            assert privileged is not None, "a privileged critic was handed no privileged state"
            return self.module.critic(self.module.privileged_scale(privileged))
        # the state that predicts the first token has seen none of them
        nothing = torch.full(
            (len(features["ids"]), self.spec.chunk * self.spec.action_dim),
            self._tokens.num_tokens - 1,
            device=features["ids"].device,
        )
        return self._values(self._hidden(features, nothing))

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what of the network is trained: adapters, or all but frozen towers."""
        self._require_log_probs()
        return [p for p in self.module.model.parameters() if p.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns the critic, with the network where it reads that."""
        critic = list(self.module.critic.parameters())
        return critic if self.config.critic is Critic.privileged else [*self.policy_parameters(), *critic]

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets what a critic's privileged state is standardised with; the network has its own statistics."""
        if name == "privileged":
            self.module.privileged_scale.set(mean, std)

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed cross-entropy of the demonstrated tokens, a mean over the C * A of a row.

        It is over the tokens that can be drawn, see `whole_vocabulary`: the reference's is over the whole vocabulary.
        """
        ids = self._tokens.encode(self._normalised(actions.cpu().numpy()))
        tokens = torch.from_numpy(ids).flatten(1).to(actions.device)
        output_layer = self.module.model.network.output_layer
        drawn_from = replace(self._distribution(1.0), top_k=0)
        found, _ = action_log_probs(self._hidden(features, tokens), output_layer, tokens, drawn_from)
        return -found.mean(1).sum()

    def _normalised(self, actions: np.ndarray) -> np.ndarray:
        """Returns what the network is to say for actions [..., A] of the env."""
        wanted = actions.astype(np.float64)
        if self.options.gripper is not Gripper.as_it_is:
            sign = 1.0 if self.options.gripper is Gripper.binary else -1.0
            wanted[..., -1] = np.where(wanted[..., -1] * sign > 0, 1.0, 0.0)
        return self.range.normalise(wanted)

    # ---------------------------------------------------------------------------------------------------------- files
    def save(self, folder: Path) -> None:
        """Writes the published layout with what this project adds; see folder.py."""
        write_policy(folder, self.config, self.env, self.checkpoint, self.module.model, self.module)


class _ChunkValueHead(nn.Module):
    """Values of a chunk's C actions from one hidden state."""

    def __init__(self, dim: int, hidden_size: int, chunk: int) -> None:
        super().__init__()
        last = nn.Linear(hidden_size, chunk)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(dim, hidden_size), nn.Tanh(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


def _require_env(env: EnvSpec, options: OpenVLAOptions) -> None:
    cameras = list(env.cameras)
    require(bool(cameras), "env.cameras", cameras, "the policy sees", "name at least one camera")
    if options.decoding is Decoding.autoregressive:
        rule = "autoregressive OpenVLA decides on one action at a time"
        require(env.chunk == 1, "env.chunk", env.chunk, rule, "set env.chunk=1")
        require(len(cameras) == 1, "env.cameras", cameras, "autoregressive OpenVLA sees one image", "name one camera")
