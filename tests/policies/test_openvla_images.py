"""Images as TensorFlow makes them for OpenVLA's evaluations: JPEG and back, Lanczos resize, centre crop."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from policies.openvla.tensorflow_images import center_crop, jpeg_round_trip, resize_for_policy

GOLDEN = Path(__file__).parents[1] / "oracles" / "openvla" / "openvla" / "golden" / "case1_image.png"
THROUGH_JPEG = "f7357676420c9b13a563e0b508e7561921dec07a3a2fdfd726ec9644ca44c8c0"
CROPPED = "2597945795ff97d50c2a9b19360bb870c51bdad68cf922b0b44d1e5b46d92596"


def smooth(height: int, width: int) -> np.ndarray:
    """Gradients and noise of a few levels."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7) + y / height, np.cos(y / 5) - x / width, np.sin((x + y) / 11)], axis=-1)
    noise = np.random.default_rng(0).normal(0, 3, waves.shape)
    return (128 + 50 * waves + noise).clip(0, 255).astype(np.uint8)


def digest(image: np.ndarray) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()


def test_images_are_those_of_tensorflow_bit_for_bit():
    image = np.array(Image.open(GOLDEN).convert("RGB"))
    assert digest(jpeg_round_trip(image)) == THROUGH_JPEG
    assert digest(resize_for_policy(image, 224)) == THROUGH_JPEG
    assert digest(center_crop(image)) == CROPPED


@pytest.mark.parametrize("shape", [(48, 64), (37, 50), (50, 41), (16, 3)])
def test_the_round_trip_is_near_another_decoder_at_any_size(shape):
    """libjpeg with its exact inverse transform differs by some levels, never by a shift or a broken edge."""
    image = smooth(*shape)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    other = np.array(Image.open(file)).astype(int)
    difference = np.abs(jpeg_round_trip(image).astype(int) - other)
    assert difference.max() <= 12
    assert difference.mean() < 1.5


@pytest.mark.parametrize(("shape", "size"), [((60, 40), 32), ((20, 30), 32), ((32, 32), 32)])
def test_lanczos_equals_a_naive_sum(shape, size):
    image = smooth(*shape)

    def weights(length):
        step = length / size
        stretch = max(step, 1.0)
        found = np.zeros((size, length))
        for row in range(size):
            for place in range(length):
                x = abs((place + 0.5) - (row + 0.5) * step) / stretch
                found[row, place] = np.sinc(x) * np.sinc(x / 3) if x < 3 else 0.0
        return found / found.sum(1, keepdims=True)

    exact = np.einsum("oh,hwc,pw->opc", weights(shape[0]), image.astype(float), weights(shape[1]))
    made = resize_for_policy(image, size, through_jpeg=False)
    assert np.abs(made - exact.clip(0, 255)).max() <= 0.5 + 1e-3


def test_the_crop_keeps_the_middle_and_the_size():
    image = np.zeros((64, 48, 3), np.uint8)
    image[20:44, 12:36] = 255
    cropped = center_crop(image)
    assert cropped.shape == image.shape
    lit = np.argwhere(cropped[..., 0] > 127)
    assert np.allclose(lit.mean(0), [31.5, 23.5])
    assert (cropped > 127).sum() > (image > 127).sum()
    assert (center_crop(np.full((9, 9, 3), 77, np.uint8)) == 77).all()
