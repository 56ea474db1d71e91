"""Vision: a DINOv2 and a SigLIP transformer of timm, and the projector to the language model."""

from __future__ import annotations

from typing import cast

import timm
import torch
from timm.layers.layer_scale import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from policies.openvla.config import OpenVLAConfig
from policies.openvla.images import CHANNELS_PER_IMAGE
from rlinf_embodied.errors import CheckpointError

# cuDNN's attention fails for SigLIP's heads of 72 in bfloat16 (torch 2.11 on an H200)
torch.backends.cuda.enable_cudnn_sdp(False)

_READ = ("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks")  # parts that `patch_features` uses


class NamedLayerScale(nn.Module):
    """timm's layer scale with the parameter name of the published files."""

    def __init__(self, gamma: Tensor) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(gamma.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBackbone(nn.Module):
    """Both towers, concatenated on the feature axis."""

    def __init__(self, config: OpenVLAConfig) -> None:
        """Builds them with random weights.

        Raises:
            CheckpointError: timm has no such model, or rejects the arguments.
        """
        super().__init__()
        self.featurizer = _tower(config, 0)
        self.fused_featurizer = _tower(config, 1)
        self.out_features = self.featurizer.embed_dim + self.fused_featurizer.embed_dim
        self.num_patches = cast(int, self.featurizer.patch_embed.num_patches)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Returns features [B, K * P, D1 + D2] of pixel values [B, K * 6, S, S], patches of the first image first.

        An image has three channels for DINOv2, then three for SigLIP.
        """
        features = []
        for image in pixel_values.split(CHANNELS_PER_IMAGE, dim=1):
            first, second = image.chunk(2, dim=1)
            both = patch_features(self.featurizer, first), patch_features(self.fused_featurizer, second)
            features.append(torch.cat(both, dim=2))
        return torch.cat(features, dim=1)

    def unread(self) -> list[nn.Module]:
        """Returns the unused parts of both towers: the last block and all after it."""
        towers = (self.featurizer, self.fused_featurizer)
        unused = [part for tower in towers for name, part in tower.named_children() if name not in _READ]
        return [*(tower.blocks[-1] for tower in towers), *unused]


def patch_features(tower: VisionTransformer, pixels: Tensor) -> Tensor:
    """Returns the patch features of images [B, 3, S, S] after the second-to-last block, before any norm: [B, P, D]."""
    x = tower.norm_pre(tower._pos_embed(tower.patch_embed(pixels)))
    for block in list(tower.blocks)[:-1]:
        x = block(x)
    return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """Projects patch features to the width of the language model."""

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
    fixed = {"pretrained": False, "num_classes": 0, "img_size": config.image_size}
    try:
        tower = timm.create_model(name, act_layer=config.act_layers[index], **fixed, **extra)
        assert isinstance(tower, VisionTransformer), "it is no vision transformer"
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"timm_model_ids[{index}] is {name!r} with {dict(extra)}, which timm {timm.__version__} cannot build "
            f"({error}): give a checkpoint with DINOv2 and SigLIP towers"
        ) from error
    for module in list(tower.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, LayerScale):
                setattr(module, child_name, NamedLayerScale(child.gamma))
    return tower
