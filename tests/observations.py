"""Envs and observations with square images of one size and one state vector, for tests that need no other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import PROPRIO, EnvSpec, Observation, features_of

CAMERAS = ("base_camera", "hand_camera")


def env_spec(
    task: str,
    num_envs: int,
    chunk: int,
    horizon: int,
    action_dim: int,
    proprio_dim: int,
    privileged_dim: int = 0,
    size: int = 64,
    cameras: Sequence[str] = (),
    categorical: bool = False,
) -> EnvSpec:
    """Returns the facts about an env."""
    images = dict.fromkeys(cameras, (size, size))
    features = features_of(images, {PROPRIO: proprio_dim}, privileged_dim)
    return EnvSpec(task, num_envs, chunk, horizon, action_dim, features, "numbers", categorical=categorical)


def observed(
    proprio: Tensor, instruction: Sequence[str], images: Tensor | None = None, privileged: Tensor | None = None
) -> Observation:
    """Returns an observation; images are uint8 [N, K, S, S, 3]."""
    shown = {} if images is None else dict(zip(CAMERAS, images.unbind(1), strict=False))
    return Observation({PROPRIO: proprio}, tuple(instruction), shown, privileged)


def pixels(seen: Observation) -> Tensor:
    """Returns the values of all cameras' images, uint8 [N, pixels x 3]; their sizes may differ."""
    return torch.cat([image.flatten(1) for image in seen.images.values()], 1)


def stacked(seen: Observation) -> Tensor:
    """Returns the images of all cameras, uint8 [N, K, S, S, 3]."""
    return torch.stack(list(seen.images.values()), 1)
