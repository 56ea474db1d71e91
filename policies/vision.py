"""Base of vision policies, and a small vision encoder: a convolutional tower per camera, and pooling of its maps.

images [B, H, W', 3] of each camera --stem--> maps [B, W, H/8, W'/8] --pool--> [B, K, W + 2 * keypoints]
             (frozen and cached in RL)                            mean of the map | x and y of each keypoint
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import KeptInFolder
from policies.critic import Criticised
from policies.lerobot_processors import NORMALISE, POST, PRE, UNNORMALISE, read_normalisation, read_steps, write_steps
from policies.tokenizer import WordTokenizer
from rlinf_embodied.config import Critic, NormMode, PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features, ImitationPolicy

IMAGES, MAPS = "images.", "maps."  # prefixes of the cameras' features
_STRIDES = (2, 2, 2, 1)
_NORM_GROUPS = 8
_KINDS = {STATE: "STATE", ACTION: "ACTION"}  # in LeRobot's files


def _tower(width: int) -> nn.Sequential:
    # group norm, since with batch norm a row's result would depend on its batch
    widths = (3, width // 2, width, width, width)
    layers = []
    for stride, (in_channels, out_channels) in zip(_STRIDES, pairwise(widths), strict=True):
        conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        layers.append(nn.Sequential(OrderedDict(conv=conv, bn=nn.GroupNorm(_NORM_GROUPS, out_channels), act=nn.GELU())))
    return nn.Sequential(*layers)


def image_features(observation: Observation) -> Features:
    """Returns the images of each camera.

    Raises:
        AssertionError: nothing was rendered.
    """
    assert observation.images, "a vision policy was handed an observation without images"
    return {IMAGES + name: images for name, images in observation.images.items()}


def of_cameras(features: Features, prefix: str = IMAGES) -> list[Tensor]:
    """Returns the features whose names have a prefix, one for each camera; [] if there are none."""
    return [value for name, value in features.items() if name.startswith(prefix)]


class VisionPolicy(KeptInFolder, Criticised, ImitationPolicy):
    """Base of policies with an optionally frozen vision encoder and normalisation of states and actions.

    Features: "proprio" [B, P], normalised, "tokens" int64 [B, L], and the encoder's features (if frozen) or the raw
    "images.<name>" of each camera.  Options have `freeze_stem`.  Without a normalisation, actions lie in [-1, 1].
    """

    options: Any
    module: Any  # with `value`, and scales named as statistics are
    _tokenizer: WordTokenizer
    normalisation: Mapping[str, Normalisation] = {}

    def encode(self, observation: Observation) -> Features:
        """Returns the features that RL caches: those of a frozen encoder, else the images."""
        return self.encode_frozen(observation) if self.options.freeze_stem else self.encode_trainable(observation)

    @torch.no_grad()
    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features with the encoder's output, through which it gets no gradient."""
        return self._seen(image_features(observation)) | self._without_images(observation)

    def _seen(self, images: Features) -> Features:
        """Returns the encoder's features for the images of each camera."""
        raise NotImplementedError

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features with the images, so that the encoder is trained with the rest."""
        return image_features(observation) | self._without_images(observation)

    def _without_images(self, observation: Observation) -> Features:
        tokens = self._tokenizer(observation.instruction).to(observation.proprio.device)
        return {"proprio": self.network_state(observation.proprio), "tokens": tokens}

    # ---------------------------------------------------------------------------------------------------------- units
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sets the normalisation from a dataset's statistics, as policy.normalise_* require.

        Raises:
            ConfigError: a feature has no statistics, or of another size.
            DataError: the statistics lack what a mode needs.
        """
        config = self.config
        sizes = {STATE: self.env.proprio_dim // self.env.history, ACTION: self.env.action_dim}
        self.normalisation = {}
        for name, path, mode in (
            (STATE, "policy.normalise_state", config.normalise_state),
            (ACTION, "policy.normalise_actions", config.normalise_actions),
        ):
            if mode is None:
                continue
            require(name in statistics, path, mode.name, f"the data has no {name}", "use a LeRobot or RLDS dataset")
            normalisation = Normalisation(name, mode, statistics[name])
            rule = f"the data's {name} has {normalisation.size} dimensions, and the env's {sizes[name]}"
            require(normalisation.size in (None, sizes[name]), path, mode.name, rule, "use data of this robot")
            self.normalisation = {**self.normalisation, name: normalisation}

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        if name != "proprio" or STATE not in self.normalisation:  # which is normalised already
            super().set_statistics(name, mean, std)

    def network_state(self, proprio: Tensor) -> Tensor:
        """Returns the network's input for the state vectors [B, F * D] of F env steps."""
        normalisation = self.normalisation.get(STATE)
        if normalisation is None:
            return proprio
        return normalisation.forward(proprio.unflatten(1, (self.env.history, -1))).flatten(1)

    def network_actions(self, actions: Tensor) -> Tensor:
        """Returns the network's targets for actions [B, C, A]."""
        normalisation = self.normalisation.get(ACTION)
        return actions if normalisation is None else normalisation.forward(actions)

    def robot_actions(self, actions: Tensor) -> Tensor:
        """Returns the robot's actions for network outputs [B, C, A]."""
        normalisation = self.normalisation.get(ACTION)
        return actions if normalisation is None else normalisation.inverse(actions)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.normalisation:
            _write(folder, self.normalisation, self.env)

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Self:
        policy = super().from_folder(folder, env, config)
        if policy.config.normalise_state or policy.config.normalise_actions:
            policy.normalisation = _read(folder, policy.config)
        return policy


def _write(folder: Path, normalisation: Mapping[str, Normalisation], env: EnvSpec) -> None:
    parts = normalisation.values()
    norm_map = {_KINDS[name]: NormMode.identity.value for name in _KINDS}
    norm_map |= {_KINDS[part.name]: part.mode.value for part in parts} | {"VISUAL": NormMode.identity.value}
    shapes = {STATE: [env.proprio_dim // env.history], ACTION: [env.action_dim]}
    statistics = {f"{part.name}.{kind}": tensor for part in parts for kind, tensor in part.statistics.items()}
    for name, step, features in ((PRE, NORMALISE, (STATE, ACTION)), (POST, UNNORMALISE, (ACTION,))):
        described = {feature: {"type": _KINDS[feature], "shape": shapes[feature]} for feature in features}
        settings = {"eps": 1e-8, "features": described, "norm_map": norm_map}
        write_steps(folder, name, [(step, settings)], statistics)


def _read(folder: Path, config: PolicyConfig) -> dict[str, Normalisation]:
    wanted = {STATE: config.normalise_state, ACTION: config.normalise_actions}
    try:
        step = read_steps(folder, PRE, {NORMALISE})[NORMALISE]
        parts = [read_normalisation(folder, step, name, kind) for name, kind in _KINDS.items()]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(
            f"{folder}: {PRE}.json cannot be used ({error!r}): give another checkpoint folder"
        ) from error
    for part in parts:
        mode = wanted[part.name] or NormMode.identity
        if part.mode is not mode or (part.size is None) is not (mode is NormMode.identity):
            has = f"{part.mode.name} and {'statistics' if part.statistics else 'no statistics'}"
            raise CheckpointError(
                f"{folder}: {PRE}.json has {has} for {part.name}, but config.json has {mode.name}: "
                "copy the folder again, or give another checkpoint"
            )
    return {part.name: part for part in parts if part.statistics}


def require_one_frame(config: PolicyConfig, env: EnvSpec) -> None:
    """Raises ConfigError if an env's observations hold images of several env steps."""
    rule = f"policy.name={config.name} sees the images of one env step"
    require(env.history == 1, "env.history", env.history, rule, "leave it out, or use policy=actor_critic")


def require_seen(config: PolicyConfig, env: EnvSpec) -> None:
    """Checks that an env has cameras, and privileged state if the critic needs it.

    Raises:
        ConfigError: they are missing.
    """
    if not env.cameras:
        raise ConfigError(
            f"env.cameras is empty, but policy.name={config.name} sees: name at least one camera, or "
            "use policy=state, which acts on the state"
        )
    require_one_frame(config, env)
    if config.critic is Critic.privileged and env.privileged_dim == 0:
        raise ConfigError(
            f"policy.critic is {config.critic.value}, but {env.task} shows no privileged state: "
            "set policy.critic=observation"
        )


class Stem(nn.Module):
    """Convolutional towers, one per camera: scales differ too much between cameras to share weights."""

    def __init__(self, num_cameras: int, width: int) -> None:
        """Takes the number of cameras K and of output channels W (a multiple of 16)."""
        super().__init__()
        self.towers = nn.ModuleList([_tower(width) for _ in range(num_cameras)])

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Maps the images of each camera, uint8 [B, H, W', 3], to feature maps, float32 [B, W, H/8, W'/8]."""
        # the permuted view is channels-last in memory, the layout in which CPU convolutions are fastest
        pairs = zip(self.towers, images, strict=True)
        return [tower(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0).contiguous() for tower, pixels in pairs]


class Pool(nn.Module):
    """Means and spatial-softmax keypoints (Levine et al. 2016) of feature maps."""

    def __init__(self, width: int, keypoints: int, image_sizes: Sequence[tuple[int, int]]) -> None:
        """Takes W, the number of keypoints per camera, and height and width of each camera's images."""
        super().__init__()
        self.keypoints = nn.ModuleList([nn.Conv2d(width, keypoints, 1, bias=False) for _ in image_sizes])
        for k, (height, wide) in enumerate(image_sizes):
            self.register_buffer(f"grid{k}", _grid(_map_size(height), _map_size(wide)), persistent=False)
        self.out_features = width + 2 * keypoints

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Pools the maps of each camera to [B, K, W + 2 * keypoints]; places run from -1 (left, top) to 1."""
        pooled = []
        for k, (conv, features) in enumerate(zip(self.keypoints, maps, strict=True)):
            attention = conv(features).flatten(2).softmax(-1)
            places = attention @ getattr(self, f"grid{k}")
            pooled.append(torch.cat([features.mean((2, 3)), places.flatten(1)], dim=-1))
        return torch.stack(pooled, dim=1)


def _map_size(pixels: int) -> int:
    for stride in _STRIDES:
        pixels = -(-pixels // stride)
    return pixels


def _grid(height: int, width: int) -> Tensor:
    """Returns x and y of each cell of a map, [height * width, 2]."""
    y, x = torch.meshgrid(torch.linspace(-1.0, 1.0, height), torch.linspace(-1.0, 1.0, width), indexing="ij")
    return torch.stack([x.reshape(-1), y.reshape(-1)], dim=1)
