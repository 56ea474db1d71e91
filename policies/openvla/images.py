"""Images as what the towers see: resized, then normalised twice, for DINOv2 and for SigLIP, stacked on channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from policies.checkpoint_folder import read_json
from policies.openvla.settings import WHOLE, OpenVLAConfig
from rlinf_embodied.errors import CheckpointError, DataError

PREPROCESSOR = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CHANNELS_PER_IMAGE = 6
_RGB = 3
RawImage = NDArray[np.uint8] | Image.Image


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
    fill: tuple[int, int, int]

    def __call__(self, images: Sequence[RawImage]) -> Tensor:
        """Returns pixel values, float32 [K * 6, S, S], of the K images of one observation, uint8 [H, W, 3] each.

        Raises:
            DataError: an image is not of that form.
        """
        return torch.cat([self._one(image) for image in images])

    def _one(self, image: RawImage) -> Tensor:
        return self.normalised(torch.from_numpy(self.squared(image))[None, None])[0]

    def squared(self, image: RawImage) -> NDArray[np.uint8]:
        """Returns an image, uint8 [H, W, 3], as [S, S, 3].

        Raises:
            DataError: it is not of that form.
        """
        return np.array(self._square(_rgb(image)))

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
            image = _letterbox(image, self.fill)
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
        strategy = cast(str, raw["image_resize_strategy"])
        means, stds = _normalisation(raw)
        sizes = {int(side) for size in cast("list[list[int]]", raw["input_sizes"]) for side in size[1:]}
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
    fill = cast("list[float]", cast("list[object]", raw.get("means") or [[0.5] * _RGB])[0])
    grey = (int(fill[0] * 255), int(fill[1] * 255), int(fill[2] * 255))
    return ImageProcessor(config.image_size, strategy, means, stds, grey)


def _normalisation(raw: Mapping[str, object]) -> tuple[Tensor, Tensor]:
    in_force = cast("list[Mapping[str, object]] | None", raw.get("tvf_normalize_params"))
    columns = (
        (raw["means"], raw["stds"])
        if in_force is None
        else ([one["mean"] for one in in_force], [one["std"] for one in in_force])
    )
    means, stds = (torch.tensor(column, dtype=torch.float32) for column in columns)
    if means.shape != (2, _RGB) or stds.shape != (2, _RGB):
        raise ValueError(f"means of the shape {tuple(means.shape)}")
    return means, stds


def _rgb(image: RawImage) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if image.ndim != _RGB or image.shape[-1] != _RGB or image.dtype != np.uint8:
        raise DataError(
            f"an image is {image.dtype} of the shape {image.shape}, but uint8 [height, width, 3] is needed: "
            "give one image of one camera at a time"
        )
    return Image.fromarray(image)


def _letterbox(image: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    longest = max(image.size)
    left, top = (int((longest - side) / 2) for side in image.size)
    padded = Image.new("RGB", (image.width + 2 * left, image.height + 2 * top), fill)
    padded.paste(image, (left, top))
    return padded
