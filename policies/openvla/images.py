"""Image processing: resize, crop, and normalisation for DINOv2 and SigLIP, on three channels each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from policies.checkpoint_folder import read_json
from policies.openvla.config import WHOLE, OpenVLAConfig, Resize
from policies.openvla.tensorflow_images import center_crop, jpeg_round_trip, lanczos_resize
from rlinf_embodied.errors import CheckpointError

PREPROCESSOR = "preprocessor_config.json"
CHANNELS_PER_IMAGE = 6
_STRATEGY = "resize-naive"  # as in openvla-7b


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """The processing of preprocessor_config.json, and the resize and crop of evaluations before it."""

    image_size: int  # pixels per side S
    means: Tensor  # of each tower and channel, float32 [2, 3], for values in [0, 1]
    stds: Tensor  # likewise
    resize: Resize = Resize.bicubic
    crop_area: float = 1.0  # share of the resized image that is kept, around its centre

    def keeps(self, height: int, width: int) -> bool:
        """Whether images of this size need no resize or crop."""
        plain = self.resize is Resize.bicubic and self.crop_area == 1
        return plain and height == width == self.image_size

    def squared(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns an image, uint8 [H, W, 3], resized to [S, S, 3], then cropped and enlarged again."""
        size = self.image_size
        if self.resize is Resize.jpeg_lanczos:
            image = lanczos_resize(jpeg_round_trip(image), size)
        elif image.shape[:2] != (size, size):
            image = np.array(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
        return image if self.crop_area == 1 else center_crop(image, self.crop_area)

    def normalised(self, images: Tensor) -> Tensor:
        """Returns pixel values, float32 [B, K * 6, S, S], of squared images, uint8 [B, K, S, S, 3], on their device."""
        values = images.permute(0, 1, 4, 2, 3)[:, :, None].to(torch.float32).div(255)  # [B, K, 1, 3, S, S]
        means, stds = (column[:, :, None, None].to(images.device) for column in (self.means, self.stds))
        return ((values - means) / stds).flatten(1, 3)


def read_processor(folder: Path, config: OpenVLAConfig) -> ImageProcessor:
    """Returns the image processor of a checkpoint folder.

    `tvf_normalize_params` take precedence, as in the reference, although they are rounded to bfloat16 in the published
    files.

    Raises:
        CheckpointError: the file is missing or damaged, or has another image size or strategy.
    """
    path = folder / PREPROCESSOR
    raw = read_json(path, WHOLE)
    params = raw.get("tvf_normalize_params")
    try:
        columns = (
            [[tower[name] for tower in params] for name in ("mean", "std")] if params else [raw["means"], raw["stds"]]
        )
        means, stds = torch.tensor(columns, dtype=torch.float32).view(2, 2, 3)
        strategy, sizes = raw["image_resize_strategy"], {int(side) for size in raw["input_sizes"] for side in size[1:]}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no image processor of OpenVLA ({error!r}): copy it again") from error
    if sizes != {config.image_size} or strategy != _STRATEGY:
        raise CheckpointError(
            f"{path}: input_sizes has sides of {sorted(sizes)} pixels and image_resize_strategy is {strategy!r}, but "
            f"{config.image_size} (image_sizes of config.json) and {_STRATEGY!r} are needed: copy both files again"
        )
    return ImageProcessor(config.image_size, means, stds)
