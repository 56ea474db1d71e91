"""FiLM on the eyes: the instruction scales and shifts what each block of the towers passes on.

The published files of such towers hold low-rank adapters that are not merged, so the towers here have them, too.
"""

from __future__ import annotations

from typing import cast

from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from policies.openvla.vision import VisionBackbone

_LARGEST_ALPHA = 16
_ADAPTER = "default"


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
        _adapt(tower, rank)
        _wrap(tower, language_dim)


def _adapt(tower: VisionTransformer, rank: int) -> None:
    for module in list(tower.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | nn.Conv2d):
                setattr(module, name, AdaptedLayer(child, rank))


def _wrap(tower: VisionTransformer, language_dim: int) -> None:
    blocks = cast("list[Block]", list(tower.blocks))
    tower.blocks = nn.Sequential(*[FilmBlock(block, tower.embed_dim, language_dim) for block in blocks])
