"""pi0, pi0.5 and SmolVLA behind the `Policy` protocol, with flow matching (policies/flow.py).

images, instruction --processors--> [-1, 1] and ids --language model--> keys and values --\\
state --normalise--> ------------------------------------------------ (or in the prompt) --expert--> velocity
chain of [C, 32] --first A dimensions, un-normalise, add the state (relative actions), clip--> [-1, 1] of the env

The folder decides the number of actions in a chunk, of which env.execute_steps are executed.  A critic on observations
reads the expert's hidden states for a chunk of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from policies.adapters import inject_adapters
from policies.checkpoint_folder import OPTIONS, dtype_of, read_json, seeded
from policies.critic import Standardise, ValueHead
from policies.flow import ActsByFlow, Expert, NoiseHead, StepNoise, pending_features
from policies.pi.config import ACTION, STATE, WHOLE, Family, PiOptions
from policies.pi.folder import Checkpoint, read_checkpoint, write_checkpoint
from policies.pi.network import Prefix
from policies.pi.processors import resized
from policies.published_folder import FILE, BeginsWithFolder
from policies.vision import IMAGES, image_features, require_seen
from rlinf_embodied.config import Critic
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.recorded import IMAGES as CAMERA
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import ACTION_IS_PAD, Features
from rlinf_embodied.learning.gradients import checkpoint_blocks


class PiPolicy(ActsByFlow, BeginsWithFolder):
    """Features: "proprio" [B, P], and "keys" and "values" [B, layers, heads, L, D] with "valid" [B, L] of the prefix.

    If the language model is trained or nothing is cached: "proprio", "ids" and "present" [B, L], and the images.
    """

    example = "small_pi.py"
    options_type = PiOptions
    shape, adapted = ("lora",), ("expert_only", "freeze_vision")
    options: PiOptions
    checkpoint: Checkpoint

    def _read(self, folder: Path) -> None:
        config, env, options = self.config, self.env, self.options
        require_seen(config, env)
        path, backbone = folder / FILE, options.backbone
        if path.is_file() and backbone == read_json(path, WHOLE)["policy"]["options"].get("backbone"):
            backbone = None  # a folder that was trained here contains it
        backbone_folder = None if backbone is None else Path(backbone).expanduser()
        checkpoint = read_checkpoint(folder, backbone_folder, dtype_of(options.precision))
        if checkpoint.processors.are_unmeasured:  # a base model has no robot
            robot = checkpoint.config.of_robot(env.proprio_dim, env.action_dim)
            checkpoint = replace(checkpoint, config=robot)
        pi_config, network = checkpoint.config, checkpoint.network
        _require_fitting(env, checkpoint)
        self._cameras = _matched(checkpoint, env, options)
        names = {CAMERA + camera: name for name, camera in self._cameras.items() if name != CAMERA + camera}
        processors = replace(checkpoint.processors, rename={**checkpoint.processors.rename, **names})
        acted = replace(pi_config, raw={**pi_config.raw, "n_action_steps": env.executed})
        self.checkpoint = replace(checkpoint, config=acted, processors=processors)
        self._flows(config.name, options, env, pi_config.steps, pi_config.max_action_dim)
        trained = network.trained(language=not options.expert_only, vision=not options.freeze_vision)
        if options.lora.rank:
            trained_ids = {id(p) for p in trained}
            frozen = [m for m in network.modules() if not any(id(p) in trained_ids for p in m.parameters())]
            inject_adapters(network, options.lora, 0, f"{OPTIONS}.lora", without_gradient=frozen)
        else:
            network.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)
                parameter.data = parameter.data.float()
        if options.checkpoint_activations:
            checkpoint_blocks(network.blocks())
        with seeded(0, "critic"):
            privileged = config.critic is Critic.privileged
            critic = ValueHead(env.privileged_dim if privileged else pi_config.expert.width, options.critic_hidden_size)
        scale = Standardise(env.privileged_dim if privileged else 0)
        parts: dict[str, nn.Module] = {"model": network, "critic": critic, "privileged_scale": scale}
        if options.noise is StepNoise.flow_noise:
            with seeded(0, "noise"):
                parts["noise"] = NoiseHead(pi_config.expert.width, pi_config.max_action_dim, options.noise_range)
        self.module: Any = nn.ModuleDict(parts).eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns the prefix of a frozen language model, or else the inputs of the language model."""
        processors, proprio = self.checkpoint.processors, observation.proprio
        prompts = processors.prompts(observation.instruction, processors.normalised_state(proprio))
        ids, present = (part.to(proprio.device) for part in self.checkpoint.tokenizer(prompts, fixed=True))
        pending = pending_features(observation)
        features = {"proprio": proprio, "ids": ids, "present": present, **image_features(observation), **pending}
        if not (self.options.expert_only and self.options.cache_prefix):
            return features
        with torch.no_grad():
            context = self._context(features)
        keys, values = (torch.stack(parts, 1) for parts in zip(*context.layers, strict=True))
        return {"proprio": proprio, "keys": keys, "values": values, "valid": context.valid, **pending}

    def _context(self, features: Features) -> Prefix:
        if "keys" in features:
            layers = list(zip(features["keys"].unbind(1), features["values"].unbind(1), strict=True))
            return Prefix(layers, features["valid"])
        pi_config, ids = self.checkpoint.config, features["ids"]
        images, shown, present = [], [], torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for camera in pi_config.cameras:
            if camera in self._cameras:
                pixels = features[IMAGES + self._cameras[camera]].permute(0, 3, 1, 2).float() / 255.0
                images.append(resized(pixels, pi_config.image_size, centred=pi_config.family is not Family.smolvla))
                shown.append(present)
        missing = len(pi_config.cameras) - len(images)
        missing = min(missing, pi_config.empty_cameras) if pi_config.family is Family.smolvla else missing
        images += [torch.full_like(images[0], -1.0)] * missing
        shown += [torch.zeros_like(present)] * missing
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.expert_only):
            return self.module.model.context(images, shown, ids, features["present"])

    def _prefix(self, features: Features) -> Prefix:
        state = self.checkpoint.processors.normalised_state(features["proprio"])
        padded = F.pad(state, (0, self.checkpoint.config.max_state_dim - state.shape[1]))
        return self.module.model.prefix(self._context(features), padded)

    def _expert(self, features: Features) -> Expert:
        """Returns the expert, whose time runs from noise (1) to actions (0)."""
        model, prefix = self.module.model, self._prefix(features)

        def expert(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            hidden = model.hidden(prefix, x, (1.0 - time.double()).float())
            return hidden, -model.action_out_proj(hidden)

        return expert

    def _chunk(self, features: Features, actions: Tensor) -> Tensor:
        normalised = self.checkpoint.processors.normalised_actions(actions, features["proprio"])
        return F.pad(normalised, (0, self.checkpoint.config.max_action_dim - actions.shape[2]))

    def _actions(self, features: Features, x: Tensor) -> Tensor:
        actions = self.checkpoint.processors.robot_actions(x[..., : self.env.action_dim], features["proprio"])
        return actions.clamp(-1.0, 1.0) if self.options.clip_actions else actions

    def _hidden(self, features: Features) -> Tensor:
        zeros = torch.zeros(len(features["proprio"]), *self.flow.shape, device=features["proprio"].device)
        return self.module.model.hidden(self._prefix(features), zeros, zeros[:, 0, 0])

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters: expert, optionally language model and vision, or adapters."""
        parts = [part for name, part in self.module.items() if name in ("model", "noise")]
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    @property
    def normalisation(self) -> Mapping[str, Normalisation]:
        """How state and actions are normalised."""
        return {part.name: part for part in (self.checkpoint.processors.state, self.checkpoint.processors.action)}

    @property
    def relative_actions(self) -> list[bool]:
        """For each dimension of an action, whether it is relative to the state of its chunk's start; [] for none."""
        relative = self.checkpoint.processors.relative
        return relative.mask(self.env.action_dim) if relative.enabled else []

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces the folder's statistics by a dataset's, as LeRobot does; policy.normalise_* change the modes.

        Raises:
            ConfigError: they are of another robot than the env's, or a base model lacks statistics of state or actions.
            DataError: they lack what a mode needs.
        """
        modes = {STATE: self.config.normalise_state, ACTION: self.config.normalise_actions}
        processors = self.checkpoint.processors.with_statistics(statistics, modes)
        mode_names = {"STATE": processors.state.mode.value, "ACTION": processors.action.mode.value}
        raw = self.checkpoint.config.raw
        raw = {**raw, "normalization_mapping": {**raw["normalization_mapping"], **mode_names}}
        config = replace(self.checkpoint.config, raw=raw)
        self.checkpoint = replace(self.checkpoint, processors=processors, config=config)
        rule = "a base model has no statistics, and the data has none of its state or actions"
        require(not processors.are_unmeasured, "data", sorted(statistics), rule, "use a LeRobot dataset")
        _require_fitting(self.env, self.checkpoint)

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns B times |v - (noise - actions)|^2, a mean over real dimensions and steps (scalar).

        x_t = t noise + (1 - t) actions at Beta-distributed t; targets["noise"] [B, C * D + 1] determines noise
        and t.  SmolVLA excludes steps beyond the episode's end, targets["action_is_pad"] (bool [B, C]), as in LeRobot.
        """
        pi_config, (noise, uniforms) = self.checkpoint.config, self.flow.parts_of(targets["noise"])
        (alpha, _), (scale, offset) = pi_config.beta, pi_config.time_range
        time = uniforms ** (1.0 / alpha) * scale + offset  # Beta(alpha, 1)
        chunk, time = self._chunk(features, actions), 1.0 - time.double()
        error = self.flow.matching_error(self._expert(features), noise, time, chunk)
        losses, is_pad = error[..., : self.env.action_dim].square().mean(2), targets.get(ACTION_IS_PAD)
        if is_pad is None or pi_config.family is not Family.smolvla:
            return losses.mean(1).sum()
        return len(actions) * (losses * ~is_pad).sum() / (~is_pad).sum().clamp(min=1)

    # ---------------------------------------------------------------------------------------------------------- files
    def _write(self, folder: Path, weights: bool) -> None:
        write_checkpoint(self.checkpoint, folder, weights=weights)


def _require_fitting(env: EnvSpec, checkpoint: Checkpoint) -> None:
    pi_config, processors = checkpoint.config, checkpoint.processors
    rule = f"the policy predicts chunks of {pi_config.chunk} actions, of which env.execute_steps are executed"
    require(env.chunk == pi_config.chunk, "env.chunk", env.chunk, rule, f"set env.chunk={pi_config.chunk}")
    for name, env_dim, policy_dim, scale, max_dim in (
        ("proprio", env.proprio_dim, pi_config.state_dim, processors.state, pi_config.max_state_dim),
        ("actions", env.action_dim, pi_config.action_dim, processors.action, pi_config.max_action_dim),
    ):
        limits = f"its statistics are of {scale.size}, and at most {max_dim} fit"
        rule = f"the policy in {checkpoint.folder} is of a robot with {policy_dim}, {limits}"
        fits = env_dim == policy_dim <= max_dim and scale.size in (None, env_dim)
        action = "use another env, folder or dataset"
        require(fits, f"{env.task}: numbers in {name}", env_dim, rule, action)
    rule = "training times are drawn of Beta(alpha, 1)"
    require(pi_config.beta[1] == 1.0, "config.json: time_sampling_beta_beta", pi_config.beta[1], rule, "use 1.0")


def _matched(checkpoint: Checkpoint, env: EnvSpec, options: PiOptions) -> dict[str, str]:
    """Returns the env's camera of each policy camera that has one."""
    policy_cameras = [name for name in checkpoint.config.cameras if "empty_camera_" not in name]
    rename = checkpoint.processors.rename
    matches = {CAMERA + name.removeprefix(CAMERA): camera for name, camera in options.cameras.items()}
    if not matches:
        matches = {rename.get(CAMERA + camera, CAMERA + camera): camera for camera in env.cameras}
        if not set(matches) & set(policy_cameras):
            matches = dict(zip(policy_cameras, env.cameras, strict=False))
    action = f"map the policy's cameras to the env's: {OPTIONS}.cameras={{<policy's>: <env's>}}"
    rule = f"the policy sees {', '.join(name.removeprefix(CAMERA) for name in policy_cameras)}"
    fits = set(matches) <= set(policy_cameras) and set(matches.values()) == set(env.cameras)
    require(fits, "env.cameras", list(env.cameras), rule, action)
    return matches
