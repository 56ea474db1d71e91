"""The eyes: a DINOv2 and a SigLIP transformer of timm, the perceptron that takes both to the language model, and FiLM.

With FiLM the instruction scales and shifts what each block of the towers passes on.  The published files of such towers
hold low-rank adapters that are not merged, so the towers here have them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import timm
import torch
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from policies.openvla.config import OpenVLAConfig
from policies.openvla.images import CHANNELS_PER_IMAGE
from rlinf_embodied.errors import CheckpointError

_CHANNELS_PER_TOWER = CHANNELS_PER_IMAGE // 2
_LARGEST_ALPHA = 16
_ADAPTER = "default"
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
        self.out_features = self.featurizer.embed_dim + self.fused_featurizer.embed_dim
        self.num_patches = cast(int, self.featurizer.patch_embed.num_patches)

    def forward(self, pixel_values: Tensor, language: Tensor | None = None) -> Tensor:
        """Returns features [B, K * P, D1 + D2] of pixel values [B, K * 6, S, S], patches of the first image first.

        Args:
            pixel_values: per image three channels for DINOv2, then three for SigLIP.
            language: what FiLM blocks modulate by [B, D]; only where the towers have such blocks.
        """
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
    name, extra = config.timm_model_ids[index], config.timm_model_args[index]
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
    _replace(tower, LayerScale, lambda scale: NamedLayerScale(scale.gamma))
    return tower


def _replace(tower: VisionTransformer, kind: Any, make: Callable[[Any], nn.Module]) -> None:
    for module in list(tower.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))


# ----------------------------------------------------------------------------------------------------------------- FiLM
class AdaptedLayer(nn.Module):
    """A linear layer or a convolution and its low-rank adapter: base(x) + alpha / r * B(A(x)), alpha = min(r, 16).

    Hu et al. 2021, arXiv:2106.09685; parameter names are those of peft.
    """

    def __init__(self, base: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        if isinstance(base, nn.Conv2d):
            down: nn.Module = nn.Conv2d(
                base.in_channels, rank, cast("tuple[int, int]", base.kernel_size),
                cast("tuple[int, int]", base.stride), bias=False,
            )  # fmt: skip
            up: nn.Linear | nn.Conv2d = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        else:
            down, up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A = nn.ModuleDict({_ADAPTER: down})
        self.lora_B = nn.ModuleDict({_ADAPTER: up})
        self.scale = min(rank, _LARGEST_ALPHA) / rank

    def forward(self, x: Tensor) -> Tensor:
        """Maps as the layer does."""
        return self.base_layer(x) + self.scale * self.lora_B[_ADAPTER](self.lora_A[_ADAPTER](x))


class FilmBlock(nn.Module):
    """A block of a vision transformer whose attention's result x becomes (1 + gamma) x + beta.

    gamma and beta are linear in the language embedding; Perez et al. 2017, arXiv:1709.07871.
    """

    def __init__(self, block: Block, dim: int, language_dim: int) -> None:
        """Takes the block, its width, and that of the language embedding."""
        super().__init__()
        self.block = block
        self.scale = nn.Linear(language_dim, dim)
        self.shift = nn.Linear(language_dim, dim)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        """Maps tokens [B, N, dim] by a language embedding [B, language_dim]."""
        block = self.block
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def add_film(backbone: VisionBackbone, language_dim: int, rank: int) -> None:
    """Puts adapters of a rank on every layer of both towers, and FiLM around every block."""
    for tower in (backbone.featurizer, backbone.fused_featurizer):
        _replace(tower, nn.Linear | nn.Conv2d, lambda layer: AdaptedLayer(layer, rank))
        blocks = cast("list[Block]", list(tower.blocks))
        tower.blocks = nn.Sequential(*[FilmBlock(block, tower.embed_dim, language_dim) for block in blocks])
