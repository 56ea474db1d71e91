"""The eyes: a DINOv2 and a SigLIP transformer of timm, and the perceptron that takes both to the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import timm
import torch
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from policies.openvla.images import CHANNELS_PER_IMAGE
from policies.openvla.settings import OpenVLAConfig
from rlinf_embodied.errors import CheckpointError, DataError

_CHANNELS_PER_TOWER = CHANNELS_PER_IMAGE // 2
_READ = ("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks")  # parts of a tower, see `patch_features`


class NamedLayerScale(nn.Module):
    """timm's layer scale with the parameter name of the published files."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(gamma.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scales [..., D]."""
        return x * self.scale_factor


class VisionBackbone(nn.Module):
    """Both towers, side by side on the feature axis."""

    def __init__(self, config: OpenVLAConfig) -> None:
        """Builds them with random weights.

        Raises:
            CheckpointError: timm has no such model, or not with these arguments.
        """
        super().__init__()
        self.featurizer = _tower(config, 0)
        self.fused_featurizer = _tower(config, 1)
        self.image_size = config.image_size
        self.out_features = self.featurizer.embed_dim + self.fused_featurizer.embed_dim
        self.num_patches = cast(int, self.featurizer.patch_embed.num_patches)

    def forward(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """Returns features [B, K * P, D1 + D2] of pixel values [B, K * 6, S, S], patches of the first image first.

        Args:
            pixel_values: per image three channels for DINOv2, then three for SigLIP.
            language: what FiLM blocks modulate by [B, D]; only where the towers have such blocks.

        Raises:
            DataError: the pixel values have another shape.
        """
        self._check(pixel_values)
        images = [self._features(one, language) for one in pixel_values.split(CHANNELS_PER_IMAGE, dim=1)]
        return torch.cat(images, dim=1)

    def unread(self) -> list[nn.Module]:
        """Returns the parts of both towers that make no features: the last block, and what stands behind it."""
        towers = (self.featurizer, self.fused_featurizer)
        behind = [part for tower in towers for name, part in tower.named_children() if name not in _READ]
        return [*(tower.blocks[-1] for tower in towers), *behind]

    def _features(self, image: Tensor, language: Tensor | None) -> Tensor:
        first, second = image.split(_CHANNELS_PER_TOWER, dim=1)
        towers = (self.featurizer, first), (self.fused_featurizer, second)
        return torch.cat([patch_features(tower, pixels, language) for tower, pixels in towers], dim=2)

    def _check(self, pixel_values: Tensor) -> None:
        size = self.image_size
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] % CHANNELS_PER_IMAGE or not shape[1] or shape[2:] != (size, size):
            raise DataError(
                f"pixel_values has the shape {shape}, but this checkpoint sees [batch, "
                f"{CHANNELS_PER_IMAGE} * images, {size}, {size}]: make it with the folder's image processor"
            )


def patch_features(tower: VisionTransformer, pixels: Tensor, language: Tensor | None = None) -> Tensor:
    """Returns what the block before the last one says of every patch, [B, P, D], without a norm.

    Args:
        tower: a vision transformer of timm.
        pixels: [B, 3, S, S].
        language: handed to every block, [B, D of the language model]; None for plain blocks.
    """
    x = tower.norm_pre(tower._pos_embed(tower.patch_embed(pixels)))
    for block in list(tower.blocks)[:-1]:
        x = block(x) if language is None else block(x, language)
    return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """Takes patch features to the width of the language model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 4 * in_features)
        self.fc2 = nn.Linear(4 * in_features, out_features)
        self.fc3 = nn.Linear(out_features, out_features)
        self.activation = nn.GELU()

    def forward(self, features: Tensor) -> Tensor:
        """Maps [B, N, in_features] to [B, N, out_features]."""
        return self.fc3(self.activation(self.fc2(self.activation(self.fc1(features)))))


def _tower(config: OpenVLAConfig, index: int) -> VisionTransformer:
    name, extra = config.timm_model_ids[index], cast("Mapping[str, Any]", config.timm_model_args[index])
    try:
        tower = timm.create_model(
            name,
            pretrained=False,
            num_classes=0,
            img_size=config.image_size,
            act_layer=config.act_layers[index],
            **extra,
        )
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"timm_model_ids[{index}] is {name!r} with {dict(extra)}, which timm {timm.__version__} cannot build "
            f"({error}): give a checkpoint with DINOv2 and SigLIP towers"
        ) from error
    if not isinstance(tower, VisionTransformer):
        raise CheckpointError(
            f"timm_model_ids[{index}] is {name!r}, which is no vision transformer: give a checkpoint with DINOv2 and "
            "SigLIP towers"
        )
    for module in list(tower.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, LayerScale):
                setattr(module, child_name, NamedLayerScale(child.gamma))
    return tower
