"""A small vision encoder: a convolutional tower per camera, and pooling of its maps.

images [B, H, W', 3] of each camera --stem--> maps [B, W, H/8, W'/8] --pool--> [B, K, W + 2 * keypoints]
             (frozen and cached in RL)                            mean of the map | x and y of each keypoint
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features

IMAGES, MAPS = "images.", "maps."  # prefixes of the cameras' features
_STRIDES = (2, 2, 2, 1)
_NORM_GROUPS = 8


def conv_tower(width: int) -> nn.Sequential:
    """Returns a tower that maps images [B, 3, H, W'] to [B, width, H/8, W'/8], to be trained from scratch."""
    return conv_layers((3, width // 2, width, width, width), _STRIDES)


def conv_layers(widths: Sequence[int], strides: Sequence[int]) -> nn.Sequential:
    """Returns 3x3 convolutions, the first from widths[0] to widths[1] channels."""
    # group norm, since with batch norm a row's result would depend on its batch
    layers = []
    for stride, (in_channels, out_channels) in zip(strides, pairwise(widths), strict=True):
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


def require_one_frame(config: PolicyConfig, env: EnvSpec) -> None:
    """Raises ConfigError if an env's observations hold images of several env steps."""
    rule = f"policy.name={config.name} sees the images of one env step"
    require(env.history == 1, "env.history", env.history, rule, "leave it out, or use policy=actor_critic")


def require_seen(config: PolicyConfig, env: EnvSpec) -> None:
    """Checks that an env has cameras, and privileged state if the critic needs it.

    Raises:
        ConfigError: they are missing.
    """
    action = "name at least one camera, or use policy=state, which acts on the state"
    require(bool(env.cameras), "env.cameras", list(env.cameras), f"policy.name={config.name} sees", action)
    require_one_frame(config, env)
    fits, rule = config.critic is not Critic.privileged or env.privileged_dim > 0, f"{env.task} shows no such state"
    require(fits, "policy.critic", config.critic.value, rule, "set policy.critic=observation")


class Stem(nn.Module):
    """Convolutional towers, one per camera: scales differ too much between cameras to share weights."""

    def __init__(self, num_cameras: int, width: int, tower: Callable[[int], nn.Module] = conv_tower) -> None:
        """Takes the number of cameras K and of output channels W (a multiple of 16)."""
        super().__init__()
        self.towers = nn.ModuleList([tower(width) for _ in range(num_cameras)])

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
