"""OpenVLA and OpenVLA-OFT behind the `Policy` protocol.

images of K cameras --resize, crop--> [B, K, S, S, 3] --normalise--> pixel values --network--> hidden [B, N, D]
instruction --prompt, fixed width--> ids [B, L]                                                       |
                                                                 tokens of actions <--action columns--+--> values
tokens --bins--> [-1, 1] --range of the data set--> the robot's action --gripper, clip_actions--> action of the env

A critic on privileged state is a separate head; one on observations reads the hidden state that predicts the first
token, and shares the network with the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from policies.adapters import inject_adapters
from policies.checkpoint_folder import OPTIONS, dtype_of, seeded
from policies.critic import HIDDEN, Standardise, ValueHead
from policies.language_folder import read_tokenizer
from policies.openvla.actions import OFT_EPSILON, ActionTokens, Range, range_of
from policies.openvla.config import Decoding, Gripper, Head, OpenVLAOptions
from policies.openvla.decoding import TokenDistribution, decode, predicting_states
from policies.openvla.folder import Checkpoint, read_checkpoint, with_oft, write_checkpoint
from policies.openvla.images import read_processor
from policies.openvla.prompt import TokenRows, prompt_for, rows_of
from policies.published_folder import FILE, BeginsWithFolder
from policies.vision import require_one_frame
from rlinf_embodied.config import Critic
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    PolicyOutput,
    Record,
    mean_of_rows,
    token_spec,
)
from rlinf_embodied.learning.gradients import checkpoint_blocks


class OpenVLAPolicy(BeginsWithFolder):
    """Features: "images" uint8 [B, K, S, S, 3], "ids" int64 and "present" bool [B, L], "proprio" [B, P] if used.

    The record is "tokens", ids of the vocabulary, int64 [B, C, A].
    """

    example = "small_openvla.py"
    options_type = OpenVLAOptions
    shape = ("decoding", "head", "proprio", "lora")
    options: OpenVLAOptions
    checkpoint: Checkpoint

    def _read(self, folder: Path) -> None:
        config, env, options, cameras = self.config, self.env, self.options, list(self.env.cameras)
        regresses = options.head is Head.l1
        require(bool(cameras), "env.cameras", cameras, "the policy sees", "name at least one camera")
        require_one_frame(config, env)
        if options.decoding is Decoding.autoregressive:
            rule = "autoregressive OpenVLA decides on one action at a time"
            require(env.chunk == 1, "env.chunk", env.chunk, rule, "set env.chunk=1")
            rule = "autoregressive OpenVLA sees one image"
            require(len(cameras) == 1, "env.cameras", cameras, rule, "name one camera")
        self.checkpoint = checkpoint = read_checkpoint(folder, dtype_of(options.precision))
        model = with_oft(checkpoint, options, env.chunk, env.action_dim, env.proprio_dim)
        self.spec = token_spec(config, env)
        towers = model.network.vision_backbone
        if options.unnorm_key is not None or (folder / FILE).is_file():  # otherwise data may be measured first
            self._require_ranges()
        self._tokens = ActionTokens(checkpoint.config.num_tokens, checkpoint.config.num_bins)
        processor = read_processor(folder, checkpoint.config)
        self._processor = replace(processor, resize=options.resize, crop_area=options.crop_area)
        self._tokenizer = read_tokenizer(folder)
        self._prompts: dict[str, TokenRows] = {}
        if options.lora.rank:
            frozen = [towers] if options.freeze_vision else towers.unread()
            whole = [part for part in (model.l1_head, model.proprio_projector) if part is not None and regresses]
            unadapted = [*frozen, *whole, *([model.network.output_layer] if regresses else [])]
            inject_adapters(model, options.lora, 0, f"{OPTIONS}.lora", without_gradient=unadapted)
            for part in whole:  # as in OpenVLA-OFT
                part.requires_grad_(True)
        if options.freeze_vision:
            towers.requires_grad_(False)
        if regresses:
            model.network.output_layer.requires_grad_(False)
        if options.checkpoint_activations:
            checkpoint_blocks(model.network.blocks())
        with seeded(0, "critic"):
            if config.critic is Critic.privileged:
                critic = ValueHead(env.privileged_dim, options.critic_hidden_size)
            else:
                critic = _chunk_value_head(model.network.dim, options.critic_hidden_size, env.chunk)
        scale = Standardise(env.privileged_dim)
        self.module: Any = nn.ModuleDict({"model": model, "critic": critic, "privileged_scale": scale}).eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns the network's inputs: resized images, prompts and normalised state."""
        assert observation.images, "a vision policy was handed an observation without images"
        device, width, pad = observation.proprio.device, self.options.prompt_length, self.checkpoint.config.pad_token_id
        for text in {*observation.instruction} - self._prompts.keys():
            self._prompts[text] = rows_of([self._tokenizer(prompt_for(text))["input_ids"]], pad, width)
        prompts = [self._prompts[text] for text in observation.instruction]
        features = {
            "images": torch.stack([self._squared(images) for images in observation.images.values()], 1),
            "ids": torch.cat([rows.ids for rows in prompts]).to(device),
            "present": torch.cat([rows.present for rows in prompts]).to(device),
        }
        if self.options.proprio:
            state = self._range("proprio").normalise(observation.proprio.cpu().numpy())
            features["proprio"] = torch.from_numpy(state).to(torch.float32).to(device)
        return features

    def _squared(self, images: Tensor) -> Tensor:
        """Returns a camera's images [B, H, W, 3] as [B, S, S, 3]."""
        if self._processor.keeps(*images.shape[1:3]):
            return images
        squared = np.stack([self._processor.squared(image) for image in images.cpu().numpy()])
        return torch.from_numpy(squared).to(images.device)

    def _inputs(self, features: Features) -> tuple[TokenRows, Tensor, Tensor | None]:
        rows = TokenRows(features["ids"], features["present"])
        return rows, self._processor.normalised(features["images"]), features.get("proprio")

    def _distribution(self, temperature: float) -> TokenDistribution:
        return TokenDistribution(self.checkpoint.config.action_columns, temperature)

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples tokens with uniforms [B, C, A]; None: the most likely ones.  Regressed actions have no noise."""
        if self.options.head is Head.l1:
            normalised = self._regressed(features)
            actions = self._robot(normalised.cpu().numpy()).to(normalised.device)
            return PolicyOutput(actions, {"actions": actions}, torch.zeros_like(actions))
        rows, pixels, proprio = self._inputs(features)
        model, distribution = self.module.model, self._distribution(temperature)
        network, uniforms = model.network, None if noise is None else noise.flatten(1)
        if self.options.decoding is Decoding.autoregressive:
            tokens, hidden = decode(network, rows, pixels, self.spec.action_dim, distribution, uniforms)
        else:
            hidden = model.hidden(rows, pixels, proprio, self.options.stop_token)
            tokens = distribution.choose(hidden, network.output_layer, uniforms)
        log_probs, _ = distribution.score(hidden, network.output_layer, tokens)
        shape = (len(pixels), self.spec.chunk, self.spec.action_dim)
        values = self._values(hidden) if self.config.critic is Critic.observation else None
        actions = self._robot(self._tokens.decode(tokens.view(shape).cpu().numpy())).to(tokens.device)
        return PolicyOutput(actions, {"tokens": tokens.view(shape)}, log_probs.view(shape), values)

    def _regressed(self, features: Features) -> Tensor:
        """Returns the L1 head's normalised actions, float32 [B, C, A], which may leave [-1, 1]."""
        model = self.module.model
        assert model.l1_head is not None
        return model.l1_head(model.hidden(*self._inputs(features), self.options.stop_token)).float()

    def _robot(self, normalised: np.ndarray) -> Tensor:
        """Converts normalised actions [..., A] to the env's, float32; in [-1, 1] with options.clip_actions."""
        epsilon = 0.0 if self.options.decoding is Decoding.autoregressive else OFT_EPSILON
        actions = self._range().expand(normalised, epsilon)
        if self.options.gripper is not Gripper.as_it_is:
            sign = 1.0 if self.options.gripper is Gripper.binary else -1.0
            actions[..., -1] = np.where(actions[..., -1] > 0.5, sign, -sign)
        clipped = actions.clip(-1.0, 1.0) if self.options.clip_actions else actions
        return torch.from_numpy(clipped).to(torch.float32)

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        """Returns log-probs and entropy [B, C, A] of "tokens", and values if the critic reads the network."""
        tokens, shape = record["tokens"].flatten(1), record["tokens"].shape
        hidden, output_layer = self._states(features, tokens), self.module.model.network.output_layer
        log_probs, entropy = self._distribution(temperature).score(hidden, output_layer, tokens, entropy_gradient)
        values = self._values(hidden) if self.config.critic is Critic.observation else None
        return Evaluation(log_probs.view(shape), entropy.view(shape), values)

    def _states(self, features: Features, tokens: Tensor) -> Tensor:
        """Returns the states [B, C * A, D] that predict tokens [B, C * A]."""
        self._require_log_probs()
        rows, pixels, proprio = self._inputs(features)
        if self.options.decoding is Decoding.autoregressive:
            return predicting_states(self.module.model.network, rows, pixels, tokens)
        return self.module.model.hidden(rows, pixels, proprio, self.options.stop_token)

    def _require_log_probs(self) -> None:
        if self.options.head is Head.l1:
            raise ObjectiveError(
                "policy.options.head is l1, but RL needs log-probs, which a regressed action does not have, and would "
                "train a token head that nothing reads: use head=discrete for RL; l1 is for fine-tuning and evaluation"
            )

    def _values(self, hidden: Tensor) -> Tensor:
        return self.module.critic(hidden[:, 0].float())

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        if self.config.critic is Critic.observation and HIDDEN not in features:
            features = {HIDDEN: self._hidden(features)}  # with a gradient: this critic also trains the network
        return super().value(features, privileged)

    def _hidden(self, features: Features) -> Tensor:
        """Returns the hidden state that predicts the first token, float32 [B, D]; it does not depend on any token."""
        shape = len(features["ids"]), self.spec.chunk * self.spec.action_dim
        tokens = torch.full(shape, self._tokens.num_tokens - 1, device=features["ids"].device)
        return self._states(features, tokens)[:, 0].float()

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters of the network: adapters, or all but frozen towers."""
        self._require_log_probs()
        return self.imitation_parameters(whole=True)

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        return [p for p in self.module.model.parameters() if p.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns the critic's parameters, and the network's if the critic reads its hidden states."""
        shared = [] if self.config.critic is Critic.privileged else self.policy_parameters()
        return [*shared, *super().value_parameters()]

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the cross-entropy of demonstrated action tokens, a mean over a row's C * A, summed over rows.

        With options.head=l1: the absolute error of normalised actions, as OpenVLA-OFT's finetune.py computes it.
        """
        normalised = self._normalised(actions.cpu().numpy())
        if self.options.head is Head.l1:
            errors = self._regressed(features) - torch.from_numpy(normalised).float().to(actions.device)
            return mean_of_rows(errors.abs(), targets).sum()
        ids = self._tokens.encode(normalised)
        tokens = torch.from_numpy(ids).flatten(1).to(actions.device)
        output_layer = self.module.model.network.output_layer
        log_probs, _ = self._distribution(1.0).score(self._states(features, tokens), output_layer, tokens)
        return mean_of_rows(-log_probs.view(len(actions), self.spec.chunk, -1), targets).sum()

    def _normalised(self, actions: np.ndarray) -> np.ndarray:
        """Returns the network's normalised targets for actions [..., A] of the env."""
        robot_actions = actions.astype(np.float64)
        if self.options.gripper is not Gripper.as_it_is:
            sign = 1.0 if self.options.gripper is Gripper.binary else -1.0
            robot_actions[..., -1] = np.where(robot_actions[..., -1] * sign > 0, 1.0, 0.0)
        return self._range().normalise(robot_actions)

    # ----------------------------------------------------------------------------------------------------- statistics
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces the folder's statistics by a dataset's, as the fine-tuning scripts of OpenVLA do.

        With options.unnorm_key, the folder's statistics of that dataset stay.  A gripper that options.gripper converts
        is not scaled.  A state that was not measured keeps the folder's statistics.

        Raises:
            ConfigError: they are of another robot than the env's.
            CheckpointError: they lack q01 or q99.
        """
        if self.options.unnorm_key is not None:
            return
        old = cast("list[dict[str, dict[str, list]]]", list(self.checkpoint.statistics.values()))
        made = {name: part for name, part in old[0].items() if name == "proprio"} if len(old) == 1 else {}
        for section, name in (("action", ACTION), ("proprio", STATE)):
            if name in statistics:
                made[section] = {kind: value.tolist() for kind, value in statistics[name].items() if kind != "count"}
        dim = len(next(iter(made["action"].values())))
        made["action"]["mask"] = [True] * (dim - 1) + [self.options.gripper is Gripper.as_it_is]
        self.checkpoint = replace(self.checkpoint, statistics={self.env.task: made})
        self._require_ranges()

    def _range(self, section: str = "action") -> Range:
        dim = self.env.action_dim if section == "action" else self.env.proprio_dim
        return range_of(self.checkpoint.statistics, self.options.unnorm_key, section, dim)

    def _require_ranges(self) -> None:
        """Raises unless there are statistics of this robot's actions, and of its state if that is read."""
        for section in ("action", "proprio") if self.options.proprio else ("action",):
            self._range(section)

    # ---------------------------------------------------------------------------------------------------------- files
    def _write(self, folder: Path, weights: bool) -> None:
        self._require_ranges()
        write_checkpoint(self.checkpoint, folder, self.module.model, weights=weights)


def _chunk_value_head(dim: int, hidden_size: int, chunk: int) -> nn.Sequential:
    """Returns a network from a hidden state [B, D] to the values of a chunk's actions [B, C], initially 0."""
    last = nn.Linear(hidden_size, chunk)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(dim, hidden_size), nn.Tanh(), last)
