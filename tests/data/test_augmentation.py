"""Random changes of images: keyed, one per sample and camera, as many as are asked for, within their ranges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import ImageAugmentation
from rlinf_embodied.data.augmentation import augmented
from rlinf_embodied.errors import ConfigError

EVERY = tuple(ImageAugmentation)
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(40, 200, (6, 32, 24, 3), np.uint8))
IMAGES = torch.nn.functional.avg_pool2d(IMAGES.permute(0, 3, 1, 2).float(), 5, 1, 2).permute(0, 2, 3, 1).to(torch.uint8)


def changed(samples: list[int], names=EVERY, number: int = 3, camera: str = "front", epoch: int = 0, images=None):
    shown = IMAGES[samples] if images is None else images
    return augmented(shown, names, number, 7, camera, epoch, np.array(samples))


def test_a_sample_is_changed_alike_in_every_minibatch_and_differently_in_every_epoch_and_camera() -> None:
    whole = changed([0, 1, 2, 3, 4, 5])
    assert torch.equal(torch.cat([changed([4, 2]), changed([5])]), whole[[4, 2, 5]])
    same = IMAGES[:1].expand(6, -1, -1, -1)
    for other in (changed([0, 1, 2, 3, 4, 5], epoch=1), changed([0, 1, 2, 3, 4, 5], camera="wrist")):
        assert not any(torch.equal(a, b) for a, b in zip(other, whole, strict=True))
    assert len({image.numpy().tobytes() for image in changed([0, 1, 2, 3, 4, 5], images=same)}) == 6
    several = changed([3], images=IMAGES[3:4, None].expand(-1, 2, -1, -1, -1))  # of one observation, with history
    assert torch.equal(several[0, 0], several[0, 1])
    assert torch.equal(several[0, 0], whole[3])


@pytest.mark.parametrize("name", EVERY)
def test_each_change_is_small_and_keeps_size_and_kind(name: ImageAugmentation) -> None:
    out = changed([0, 1, 2, 3, 4, 5], [name])
    assert (out.dtype, out.shape) == (torch.uint8, IMAGES.shape)
    off = (out.float() - IMAGES.float()).abs().mean((1, 2, 3))
    assert off.max() > 0.2
    assert off.max() < 50


def test_without_cameras_nothing_can_be_changed() -> None:
    with pytest.raises(ConfigError, match=r"warm_start.augment is \['hue'\], but it changes images, and"):
        compose_train(["env=point_reach", "env.cameras=[]", "warm_start.augment=[hue]"])
    assert compose_train(["warm_start.augment=[hue]"]).warm_start.augment == [ImageAugmentation.hue]


def test_as_many_changes_as_asked_for() -> None:
    grey = torch.full((200, 8, 8, 3), 100, dtype=torch.uint8)
    out = augmented(grey, [ImageAugmentation.brightness, ImageAugmentation.hue], 1, 0, "front", np.arange(200))
    touched = (out != grey).flatten(1).any(1)  # hue does nothing to grey
    assert 70 < touched.sum() < 130
    assert out[touched].min() >= 80
    assert out.max() <= 120
