"""What evaluations put in front of the image processor, so that images look as in training: resize, centre crop.

Both are TensorFlow's operations, which the training data went through; libraries differ from it by some levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.openvla.jpeg import jpeg_round_trip

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
