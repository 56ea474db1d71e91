"""Recorded episodes of any format, read frame by frame as in LeRobot's library.

    format            read by        vectors              images
    LeRobot v3, v2    lerobot.py     in memory            decoded on request, from videos or PNG
    RLDS              rlds.py        in memory            decoded on request, from JPEG or PNG

A frame is an env step: an observation, and the action that was taken in it.  Frames are numbered over all episodes, in
the order of episodes.  Features have LeRobot's names and descriptions, {name: {dtype, shape, names}}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.data.statistics import QUANTILES, Statistics, combine, image_statistics, vector_statistics
from rlinf_embodied.errors import DataError

ACTION, STATE, IMAGES = "action", "observation.state", "observation.images."
_PREFIXES = (IMAGES, "observation.image.", "observation.")  # of image features, removed from cameras' names
_TOLERANCE_S = 1e-4  # of a delta_timestamp from a multiple of 1 / fps


class RecordedDataset(ABC):
    """A dataset of E episodes and F frames; only its descriptions are read until frames are requested.

    `dataset[k]` is the item of frame k as a dict of tensors: vectors float32, whole numbers int64, images float32
    [3, H, W] in [0, 1], and the task as text.  A feature of `delta_timestamps` has a leading axis, an entry for each of
    these offsets in seconds, and a bool tensor `<feature>_is_pad`: entries beyond the episode repeat its first or last
    frame and are flagged.
    """

    fps: float
    features: Mapping[str, Mapping[str, Any]]
    lengths: np.ndarray  # int64 [E], frames of each episode
    where: str  # the beginning of error messages
    measured: Mapping[str, Statistics]  # statistics stored in the dataset, by feature

    def __init__(self, delta_timestamps: Mapping[str, Sequence[float]] | None = None) -> None:
        """Takes the windows of items; `features` and `fps` must be set before.

        Raises:
            DataError: a feature does not exist, or a time is not a multiple of 1 / fps.
        """
        self._deltas: dict[str, list[int]] = {}
        for name, seconds in (delta_timestamps or {}).items():
            if name not in self.features:
                known = ", ".join(self.features)
                raise DataError(f"{self.where}, which has no feature {name!r} of delta_timestamps: use some of {known}")
            self._deltas[name] = [round(s * self.fps) for s in seconds]
            off = [s for s in seconds if abs(round(s * self.fps) / self.fps - s) > _TOLERANCE_S]
            if off:
                rule = f"its frames are 1 / {self.fps:g} s apart"
                raise DataError(f"{self.where}, but delta_timestamps has {off} for {name}: {rule}; use multiples")

    # ------------------------------------------------------------------------------------------ what a format provides
    @abstractmethod
    def _read_columns(self) -> dict[str, np.ndarray]:
        """Returns all features but images, [F, ...]; float32, int64, bool or str."""

    @abstractmethod
    def _read_images(self, feature: str, rows: np.ndarray) -> np.ndarray:
        """Returns the images of frames, uint8 [len(rows), H, W, 3]."""

    @abstractmethod
    def task(self, row: int) -> str:
        """Returns the instruction of a frame."""

    @property
    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """The instructions of the dataset."""

    # ----------------------------------------------------------------------------------------------------- descriptions
    def __len__(self) -> int:
        """Returns the number of frames."""
        return int(self.lengths.sum())

    @property
    def num_episodes(self) -> int:
        return len(self.lengths)

    @cached_property
    def ends(self) -> np.ndarray:
        """The frame after the last one of each episode, int64 [E]."""
        return np.cumsum(self.lengths)

    @cached_property
    def cameras(self) -> dict[str, str]:
        """The feature of each camera by the camera's name, which is the feature's name without its prefix."""
        cameras = {}
        for feature in self.features:
            if self.features[feature]["dtype"] in ("image", "video"):
                prefix = next((prefix for prefix in _PREFIXES if feature.startswith(prefix)), "")
                cameras[feature.removeprefix(prefix)] = feature
        return cameras

    @cached_property
    def states(self) -> dict[str, int]:
        """The lengths of the features of the robot's state, by name: observation.state, or those that start with it."""
        sizes = {name: self.size(name) for name in self.features if name == STATE or name.startswith(STATE + ".")}
        return {name: size for name, size in sizes.items() if size is not None}

    def size(self, name: str) -> int | None:
        """Returns the number of entries of a vector feature, None if there is no such feature."""
        shape = self.features.get(name, {}).get("shape")
        return int(shape[0]) if shape and len(shape) == 1 else None

    def image_size(self, camera: str) -> tuple[int, int]:
        """Returns height and width of a camera's images, whose axes the dataset may name in any order."""
        feature = self.features[self.cameras[camera]]
        axes = dict(zip(feature.get("names") or ("height", "width", "channels"), feature["shape"], strict=True))
        return int(axes["height"]), int(axes["width"])

    # ----------------------------------------------------------------------------------------------------------- frames
    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """All features but images, [F, ...].

        Raises:
            DataError: a file is missing or damaged, or does not match the descriptions.
        """
        return self._read_columns()

    @cached_property
    def state(self) -> np.ndarray:
        """The robot's state, float32 [F, P]."""
        parts = [self.columns[name].reshape(len(self), -1) for name in self.states]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def frames(self, episode: int) -> range:
        """Returns the frames of an episode."""
        return range(int(self.ends[episode] - self.lengths[episode]), int(self.ends[episode]))

    def window(self, rows: np.ndarray, deltas: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the frames at these offsets from frames [B], int64 [B, W], and whether they lie beyond the episode.

        Where this mask, bool [B, W], is True, the frame is the episode's first or last one.
        """
        episode = np.searchsorted(self.ends, rows, side="right")
        first, last = (self.ends - self.lengths)[episode][:, None], self.ends[episode][:, None] - 1
        frames = rows[:, None] + np.asarray(deltas)
        return frames.clip(first, last), (frames < first) | (frames > last)

    def images(self, camera: str, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns a camera's images of frames, uint8 [len(rows), H, W, 3]; each frame is decoded once.

        Raises:
            DataError: a file is missing or damaged, or does not hold these frames.
        """
        unique, inverse = np.unique(np.asarray(rows), return_inverse=True)
        return self._read_images(self.cameras[camera], unique)[inverse]

    def __getitem__(self, frame: int) -> dict[str, Tensor | str]:
        if not -len(self) <= frame < len(self):
            raise IndexError(f"frame {frame} of {len(self)}")
        row = np.array([frame % len(self)])
        item: dict[str, Tensor | str] = {}
        cameras = {feature: camera for camera, feature in self.cameras.items()}
        for name in (*self.columns, *cameras):
            deltas = self._deltas.get(name)
            (rows,), is_pad = self.window(row, deltas or [0])
            if name in cameras:
                pixels = self.images(cameras[name], rows).transpose(0, 3, 1, 2)
                values = pixels.astype(np.float32) / np.float32(255.0)
            else:
                values = self.columns[name][rows]
            if deltas is None:
                item[name] = str(values[0]) if values.dtype.kind in "OU" else torch.as_tensor(values[0])
            else:
                item[name], item[f"{name}_is_pad"] = torch.from_numpy(values), torch.from_numpy(is_pad[0])
        return item | {"task": self.task(int(row[0]))}

    # ------------------------------------------------------------------------------------------------------- statistics
    def statistics(self, names: Sequence[str]) -> dict[str, Statistics]:
        """Returns the statistics of features; computes those that the dataset does not contain."""
        known = {n: s for n, s in self.measured.items() if {*QUANTILES, "mean", "std", "min", "max"} <= s.keys()}
        return {name: known[name] if name in known else self.compute_statistics(name) for name in names}

    def relative_action_statistics(self, chunk: int, relative: Sequence[bool]) -> Statistics:
        """Returns the statistics of actions relative to the state at the start of their chunk.

        Args:
            chunk: actions per chunk; incomplete chunks at an episode's end are left out.
            relative: for each dimension of an action, whether the state's is subtracted.

        Raises:
            DataError: every episode is shorter than a chunk.
        """
        if self.lengths.max() < chunk:
            rule = f"its longest episode has {self.lengths.max()} frames, and a chunk {chunk} actions"
            raise DataError(f"{self.where}, but {rule}: use a smaller env.chunk, or other data")
        parts = []
        for frames in map(self.frames, range(self.num_episodes)):
            starts = np.arange(frames.start, frames.stop - chunk + 1)
            actions = self.columns[ACTION][starts[:, None] + np.arange(chunk)]
            width = min(len(relative), self.state.shape[1])
            offset = np.zeros((len(starts), 1, len(relative)), actions.dtype)
            offset[:, 0, :width] = self.state[starts][:, :width] * np.asarray(relative)[:width]
            parts.append((actions - offset).reshape(-1, len(relative)))
        return vector_statistics(np.concatenate(parts))

    def compute_statistics(self, name: str) -> Statistics:
        """Returns the statistics of a feature from its frames."""
        episodes = (self.frames(episode) for episode in range(self.num_episodes))
        camera = next((c for c, feature in self.cameras.items() if feature == name), None)
        if camera is not None:
            return combine(image_statistics(self.images(camera, rows)) for rows in episodes)
        return combine(vector_statistics(self.columns[name][rows.start : rows.stop]) for rows in episodes)
