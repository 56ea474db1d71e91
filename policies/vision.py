"""The eyes: one convolutional tower per camera, and the pooling that turns its maps into a few numbers per camera.

images [B, K, S, S, 3] --stem--> maps [B, K, W, S/8, S/8] --pool--> [B, K, W + 2 * keypoints]
       (frozen and cached in RL)                          mean of the map | where each keypoint is, x and y
"""

from __future__ import annotations

import torch
from timm.layers.conv_bn_act import ConvNormAct
from torch import Tensor, nn

_STRIDES = (2, 2, 2, 1)
_NORM_GROUPS = 8


def _tower(width: int) -> nn.Sequential:
    # group norm: a row's result must not depend on its batch, which rules batch norm out
    widths = (3, width // 2, width, width, width)
    norm = {"norm_layer": "groupnorm", "act_layer": "gelu", "norm_kwargs": {"num_groups": _NORM_GROUPS}}
    return nn.Sequential(
        *[ConvNormAct(widths[i], widths[i + 1], 3, stride, **norm) for i, stride in enumerate(_STRIDES)]
    )


class Stem(nn.Module):
    """Convolutional towers, one per camera: cameras see the scene at scales too different to share weights."""

    def __init__(self, num_cameras: int, width: int) -> None:
        """Takes the number of cameras K and of output channels W (a multiple of 16)."""
        super().__init__()
        self.towers = nn.ModuleList([_tower(width) for _ in range(num_cameras)])

    def forward(self, images: Tensor) -> Tensor:
        """Maps images, uint8 [B, K, S, S, 3], to feature maps, float32 [B, K, W, S/8, S/8]."""
        # the permuted view is channels-last in memory, the layout in which CPU convolutions are fastest
        maps = [tower(images[:, k].permute(0, 3, 1, 2).float() / 127.5 - 1.0) for k, tower in enumerate(self.towers)]
        return torch.stack([single.contiguous() for single in maps], dim=1)


class Pool(nn.Module):
    """Means and spatial-softmax keypoints (Levine et al. 2016) of feature maps."""

    grid: Tensor

    def __init__(self, num_cameras: int, width: int, keypoints: int, map_size: int) -> None:
        """Takes K, W, the number of keypoints per camera, and the width and height of a map in cells."""
        super().__init__()
        self.keypoints = nn.ModuleList([nn.Conv2d(width, keypoints, 1, bias=False) for _ in range(num_cameras)])
        axis = torch.linspace(-1.0, 1.0, map_size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        self.register_buffer("grid", torch.stack([x.reshape(-1), y.reshape(-1)], dim=1), persistent=False)
        self.out_features = width + 2 * keypoints

    def forward(self, maps: Tensor) -> Tensor:
        """Pools [B, K, W, M, M] to [B, K, W + 2 * keypoints]; places run from -1 (left, top) to 1."""
        pooled = []
        for k, conv in enumerate(self.keypoints):
            attention = conv(maps[:, k]).flatten(2).softmax(-1)
            places = attention @ self.grid
            pooled.append(torch.cat([maps[:, k].mean((2, 3)), places.flatten(1)], dim=-1))
        return torch.stack(pooled, dim=1)
