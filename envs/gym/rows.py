"""What rows of a Gymnasium env are to the project, wherever they run: here, or behind a pipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from envs.batched.checks import short
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError

_LOG = logging.getLogger(__name__)


class GymnasiumRows(Simulator):
    """Rows of one Gymnasium id; a subclass has the rows and says what they tell and show."""

    def __init__(self, config: EnvConfig, filmable: bool) -> None:
        self._config, self._filmable = config, filmable

    def tell(self) -> Mapping[str, np.ndarray]:
        """Returns state [N, P], reward, success, terminated and truncated [N] of all rows."""
        raise NotImplementedError

    def look(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Returns what the policy sees of each of these rows, of any size."""
        raise NotImplementedError

    def render(self, rows: Sequence[int], size: int) -> list[np.ndarray]:
        """Returns what each of these rows draws, of any size, `size` where it can choose."""
        raise NotImplementedError

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows.

        Raises:
            SimulatorError: an observation or reward is NaN or infinite.
        """
        told = self.tell()
        for name, value in (("observation", told["state"]), ("reward", told["reward"])):
            if not np.isfinite(value).all():
                rows = np.flatnonzero(~np.isfinite(value.reshape(self.num_rows, -1)).all(1)).tolist()
                raise SimulatorError(
                    f"env.task is {self._config.task!r}, whose {name} is NaN or infinite in rows {short(rows)}: a "
                    "policy would learn NaN from it; let the env end such an episode, and return finite numbers"
                )
        copies = {name: torch.from_numpy(value.copy()) for name, value in told.items()}
        return Measurement(proprio=copies.pop("state"), **copies)

    def images(self, rows: Sequence[int]) -> Tensor:
        """Returns what `render` gives, or the observation where that shows an image, uint8 [len(rows), 1, S, S, 3]."""
        return torch.stack([resized(image, self._config.obs_size) for image in self.look(rows)])[:, None]

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns what `render` gives; {} where the env cannot draw, which is said once."""
        if not self._filmable:
            return {}
        try:
            return {row: resized(image, size) for row, image in zip(rows, self.render(rows, size), strict=True)}
        except SimulatorError as error:
            self._filmable = False
            _LOG.warning("there will be no videos: %s", error)
            return {}


def resized(image: np.ndarray, size: int) -> Tensor:
    """Returns an image [H, W], [H, W, 1] or [H, W, 3] as uint8 [size, size, 3]; each pixel is the mean of its area.

    Raises:
        SimulatorError: it has another number of channels.
    """
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise SimulatorError(
            f"an image has shape {list(image.shape)}, but policies see [height, width], or 1 or 3 channels behind "
            "these: put a wrapper around the env that gives it one of these shapes, and register that"
        )
    if tuple(pixels.shape[:2]) != (size, size):
        scaled = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), (size, size), mode="area")
        pixels = scaled[0].permute(1, 2, 0).round().to(torch.uint8)
    return pixels.to(torch.uint8).expand(size, size, 3).contiguous()
