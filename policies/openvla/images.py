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
from policies.openvla.jpeg import jpeg_round_trip
from policies.openvla.settings import WHOLE, OpenVLAConfig
from rlinf_embodied.errors import CheckpointError, DataError

CROP_AREA = 0.9
_LOBES = 3.0


def resize_for_policy(image: NDArray[np.uint8], size: int, through_jpeg: bool = True) -> NDArray[np.uint8]:
    """Returns an image, uint8 [H, W, 3], as [size, size, 3]: JPEG and back, then a Lanczos filter without aliasing."""
    source = jpeg_round_trip(image) if through_jpeg else image
    tall = _resampled(source.astype(np.float32), size)
    resized = _resampled(tall.swapaxes(0, 1), size).swapaxes(0, 1)
    return np.rint(resized).clip(0, 255).astype(np.uint8)


def center_crop(image: NDArray[np.uint8], area: float = CROP_AREA) -> NDArray[np.uint8]:
    """Returns the middle of an image, uint8 [H, W, 3], that holds `area` of it, blown up to its own size."""
    values = image.astype(np.float32) * np.float32(1.0 / 255.0)
    height, width = image.shape[:2]
    narrow = _lerp(values.swapaxes(0, 1), *_crop_places(width, area)).swapaxes(0, 1)
    cropped = _lerp(narrow, *_crop_places(height, area))
    return np.floor(cropped.clip(0.0, 1.0) * np.float32(255.5)).clip(0, 255).astype(np.uint8)


def _resampled(values: NDArray[np.float32], wanted: int) -> NDArray[np.float32]:
    """Resamples the first axis, in float32 and from the first source row to the last: sums depend on their order."""
    size = len(values)
    step = np.float32(1.0) / (np.float32(wanted) / np.float32(size))
    stretch = max(step, np.float32(1.0))
    centers = (np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * step
    reach = np.float32(_LOBES) * stretch
    first = np.ceil(centers - reach - np.float32(0.5)).astype(np.int64).clip(0)
    last = np.floor(centers + reach - np.float32(0.5)).astype(np.int64).clip(max=size - 1)
    total = np.zeros(wanted, np.float32)
    weights = []
    for rows in (first + k for k in range(int((last - first).max()) + 1)):
        distance = np.abs(rows.astype(np.float32) + np.float32(0.5) - centers) * (np.float32(1.0) / stretch)
        weights.append(np.where(rows <= last, _lanczos(distance), np.float32(0.0)))
        total += weights[-1]
    resampled = np.zeros((wanted, *values.shape[1:]), np.float32)
    for k, weight in enumerate(weights):
        resampled += (weight * (np.float32(1.0) / total))[:, None, None] * values[(first + k).clip(max=size - 1)]
    return resampled


def _lanczos(x: NDArray[np.float32]) -> NDArray[np.float32]:
    lobes, turn = np.float32(_LOBES), np.float32(np.pi)
    near = np.maximum(x, np.float32(1e-3))
    values = lobes * np.sin(turn * near) * np.sin(turn * near / lobes) / (turn * turn * near * near)
    return np.where(x <= 1e-3, np.float32(1.0), np.where(x > lobes, np.float32(0.0), values))


def _crop_places(side: int, area: float) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Returns (row before, row after, weight of the latter) of each row of the crop; its corners are pixel centres."""
    share = np.sqrt(np.float32(area))
    first = (np.float32(1.0) - share) / np.float32(2.0)
    last = first + share
    step = (last - first) * np.float32(side - 1) / np.float32(side - 1)
    places = first * np.float32(side - 1) + np.arange(side, dtype=np.float32) * step
    before = np.floor(places)
    return before.astype(np.intp), np.ceil(places).astype(np.intp), (places - before).astype(np.float32)


def _lerp(
    values: NDArray[np.float32], before: NDArray[np.intp], after: NDArray[np.intp], weight: NDArray[np.float32]
) -> NDArray[np.float32]:
    return (values[before] + (values[after] - values[before]) * weight[:, None, None]).astype(np.float32)


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
