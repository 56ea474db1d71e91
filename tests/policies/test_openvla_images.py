"""Images as TensorFlow makes them for OpenVLA's evaluations: JPEG and back, Lanczos resize, centre crop."""

import hashlib
from pathlib import Path

import numpy as np
from PIL import Image

from policies.openvla.tensorflow_images import center_crop, jpeg_round_trip, resize_for_policy

GOLDEN = Path(__file__).parents[1] / "oracles" / "openvla" / "openvla" / "golden" / "case1_image.png"
THROUGH_JPEG = "f7357676420c9b13a563e0b508e7561921dec07a3a2fdfd726ec9644ca44c8c0"
CROPPED = "2597945795ff97d50c2a9b19360bb870c51bdad68cf922b0b44d1e5b46d92596"


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def test_images_are_those_of_tensorflow_bit_for_bit():
    image = np.array(Image.open(GOLDEN).convert("RGB"))
    assert digest(jpeg_round_trip(image)) == THROUGH_JPEG
    assert digest(resize_for_policy(image, 224)) == THROUGH_JPEG
    assert digest(center_crop(image)) == CROPPED
