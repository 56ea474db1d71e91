"""Images as what the towers see: resized, then normalised twice, for DINOv2 and for SigLIP, stacked on channels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from policies.checkpoint_folder import read_json
from policies.openvla.config import WHOLE, OpenVLAConfig
from rlinf_embodied.errors import CheckpointError

PREPROCESSOR = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CHANNELS_PER_IMAGE = 6
_GREY = [0.5, 0.5, 0.5]


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """What preprocessor_config.json says.

    Attributes:
        image_size: pixels per side S.
        strategy: how an image becomes a square: squashed, padded, or cropped.
        means: of each tower and channel, float32 [2, 3], for values in [0, 1].
        stds: the same.
        fill: grey values of the padding.
    """

    image_size: int
    strategy: str
    means: Tensor
    stds: Tensor
    fill: tuple[int, ...]

    def squared(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns an image, uint8 [H, W, 3], as [S, S, 3]."""
        return np.array(self._square(Image.fromarray(image)))

    def normalised(self, images: Tensor) -> Tensor:
        """Returns pixel values, float32 [B, K * 6, S, S], of squared images, uint8 [B, K, S, S, 3], on their device."""
        values = images.permute(0, 1, 4, 2, 3)[:, :, None].to(torch.float32).div(255)  # [B, K, 1, 3, S, S]
        means, stds = (column[:, :, None, None].to(images.device) for column in (self.means, self.stds))
        return ((values - means) / stds).flatten(1, 3)

    def _square(self, image: Image.Image) -> Image.Image:
        size = self.image_size
        if self.strategy == "resize-crop":
            scale = size / min(image.size)
            wide, high = (size if side == min(image.size) else int(side * scale) for side in image.size)
            left, top = round((wide - size) / 2.0), round((high - size) / 2.0)
            resized = image.resize((wide, high), Image.Resampling.BICUBIC)
            return resized.crop((left, top, left + size, top + size))
        if self.strategy == "letterbox":
            left, top = (int((max(image.size) - side) / 2) for side in image.size)
            padded = Image.new("RGB", (image.width + 2 * left, image.height + 2 * top), self.fill)
            padded.paste(image, (left, top))
            image = padded
        return image if image.size == (size, size) else image.resize((size, size), Image.Resampling.BICUBIC)


def read_processor(folder: Path, config: OpenVLAConfig) -> ImageProcessor:
    """Returns the image processor of a checkpoint folder.

    Where the file holds `tvf_normalize_params`, these are in force, as in the reference, although they are rounded to
    bfloat16 in the published files.

    Raises:
        CheckpointError: the file is missing or damaged, or has another image size or strategy.
    """
    path = folder / PREPROCESSOR
    raw = read_json(path, WHOLE)
    try:
        strategy, (means, stds) = raw["image_resize_strategy"], _normalisation(raw)
        sizes = {int(side) for size in raw["input_sizes"] for side in size[1:]}
        grey = tuple(int(value * 255) for value in (raw.get("means") or [_GREY])[0])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no image processor of OpenVLA ({error!r}): copy it again") from error
    if sizes != {config.image_size}:
        raise CheckpointError(
            f"{path}: input_sizes has sides of {sorted(sizes)} pixels, but image_sizes of config.json is "
            f"{config.image_size}: both must belong to one checkpoint, copy them again"
        )
    if strategy not in STRATEGIES:
        raise CheckpointError(
            f"{path}: image_resize_strategy is {strategy!r}, but it must be one of {', '.join(STRATEGIES)}: "
            "give another folder"
        )
    return ImageProcessor(config.image_size, strategy, means, stds, grey)


def _normalisation(raw: dict[str, Any]) -> tuple[Tensor, Tensor]:
    in_force = raw.get("tvf_normalize_params") or []
    columns = ([one["mean"] for one in in_force], [one["std"] for one in in_force])
    means, stds = (torch.tensor(c, dtype=torch.float32) for c in (columns if in_force else (raw["means"], raw["stds"])))
    if means.shape != (2, 3) or stds.shape != (2, 3):
        raise ValueError(f"means of the shape {tuple(means.shape)}")
    return means, stds
