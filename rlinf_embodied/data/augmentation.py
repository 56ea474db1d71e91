"""Random changes of images in training, by keyed draws: those of LeRobot's ImageTransforms, a crop and a blur.

    brightness, contrast     factor in [0.8, 1.2]
    saturation, sharpness    factor in [0.5, 1.5]
    hue                      shift in [-0.05, 0.05] of the circle
    affine                   rotation by at most 5 degrees, shift by at most 5 % of a side; the border is black
    crop                     square cut-out of 80 to 100 % of the area, at any place, resized
    blur                     Gaussian, standard deviation of 0.1 to 2 pixels

All images of a sample and a camera are changed in the same way: by a uniformly random subset of the named changes, in
this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from rlinf_embodied.config import ImageAugmentation as Name
from rlinf_embodied.randomness import permutation, uniform

_RANGES = {
    Name.brightness: (0.8, 1.2),
    Name.contrast: (0.8, 1.2),
    Name.saturation: (0.5, 1.5),
    Name.hue: (-0.05, 0.05),
    Name.sharpness: (0.5, 1.5),
    Name.affine: (-5.0, 5.0),
    Name.crop: (0.8, 1.0),
    Name.blur: (0.1, 2.0),
}
_SHIFT = 0.05  # of a side, by affine
_ADJUST = {
    Name.brightness: v2.functional.adjust_brightness,
    Name.contrast: v2.functional.adjust_contrast,
    Name.saturation: v2.functional.adjust_saturation,
    Name.hue: v2.functional.adjust_hue,
    Name.sharpness: v2.functional.adjust_sharpness,
}


def augmented(images: Tensor, names: Sequence[Name], number: int, seed: int, camera: str, *ids: object) -> Tensor:
    """Returns images changed at random.

    Args:
        images: uint8 [M, ..., H, W, 3] of one camera.
        names: the changes to choose from.
        number: of changes per sample, at most as many as there are names.
        seed: run seed.
        camera: the camera's name, which is part of the key of the draws.
        ids: the rest of the key: integers, and last the int64 array [M] of samples.
    """
    *shared, samples = ids
    chosen = [name for name in Name if name in names]
    draws = uniform(seed, f"augment/{camera}", *shared, samples, shape=(len(Name), 3))  # type: ignore[arg-type]
    augmented_images = []
    for image, sample, drawn in zip(images, np.asarray(samples).tolist(), draws, strict=True):
        order = permutation(seed, f"augment/{camera}/which", *shared, sample, size=len(chosen))  # type: ignore[arg-type]
        changed = image.movedim(-1, -3)
        for k in sorted(order[:number].tolist()):
            changed = _change(changed, chosen[k], *drawn[list(Name).index(chosen[k])].tolist())
        augmented_images.append(changed.movedim(-3, -1))
    return torch.stack(augmented_images)


def _change(images: Tensor, name: Name, drawn: float, right: float, down: float) -> Tensor:
    """Returns images uint8 [..., 3, H, W] after one change; the last three arguments are uniform draws."""
    low, high = _RANGES[name]
    value, (height, width) = low + (high - low) * drawn, images.shape[-2:]
    if name in _ADJUST:
        return _ADJUST[name](images, value)
    if name is Name.affine:
        shift = [float(round(side * _SHIFT * (2 * place - 1))) for side, place in ((width, right), (height, down))]
        return v2.functional.affine(images, value, shift, 1.0, [0.0, 0.0])
    if name is Name.crop:
        rows, columns = (max(1, round(side * math.sqrt(value))) for side in (height, width))
        top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
        return v2.functional.resized_crop(images, top, left, rows, columns, [height, width])
    size = 2 * math.ceil(3 * _RANGES[name][1]) + 1  # reflected at the border, so it must not be wider than the image
    size = min(size, 2 * min(height, width) - 1)
    return v2.functional.gaussian_blur(images, [size, size], [value, value])
