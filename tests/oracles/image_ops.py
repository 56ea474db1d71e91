"""TensorFlow's image operations against their goldens: JPEG and back, Lanczos resize, centre crop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from policies.openvla.tensorflow_images import center_crop, jpeg_round_trip, resize_for_policy
from rlinf_embodied.errors import DataError
from tests.oracles.goldens import Difference

FILE = "golden.npz"
_NUM_LEVELS = 255
_SHARE = 1e-4  # of the values that may be one level off, where a sum in float32 ends next to a half


def check(folder: Path) -> list[Difference]:
    """Compares all goldens of a folder whose images are in ../openvla/golden.

    Differences are the share of values that are off; one that is off by more than a level counts as infinite.
    """
    goldens = np.load(folder / FILE)
    found = []
    for name in goldens.files:
        case, _, operation = name.partition(".")
        found.append(Difference(name, _off(_made(folder, case, operation, goldens), goldens[name]), _SHARE))
    return found


def _made(folder: Path, case: str, operation: str, goldens: np.lib.npyio.NpzFile) -> NDArray[np.uint8]:
    resized = goldens[f"{case}.resized"]
    size = resized.shape[0]
    path = folder.parent / "openvla" / "golden" / f"{case}_image.png"
    if not path.is_file():
        raise DataError(f"{folder / FILE} was made from {path}, which is not there: copy that oracle folder, too")
    image = np.array(Image.open(path).convert("RGB"))
    if operation == "jpeg_roundtrip":
        return jpeg_round_trip(image)
    if operation == "center_cropped":
        return center_crop(image if image.shape == resized.shape else resized)
    return resize_for_policy(image, size, through_jpeg="nojpeg" not in operation)


def _off(here: NDArray[np.uint8], golden: NDArray[np.uint8]) -> float:
    if here.shape != golden.shape:
        return float("inf")
    levels = np.abs(here.astype(np.int64) - golden)
    return float("inf") if levels.max() > 1 else float((levels > 0).mean())
