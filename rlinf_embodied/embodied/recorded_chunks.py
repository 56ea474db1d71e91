"""Demonstrations of a recorded dataset: a chunk starts at every frame, and images are decoded when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.demonstrations import Chunks, Demonstrations
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.recorded import ACTION, RecordedDataset
from rlinf_embodied.interfaces.envs import EnvSpec, FeatureKind, Observation


@dataclass(frozen=True, slots=True)
class RecordedChunks(Chunks):
    """The chunks that start at frames [M] of a dataset."""

    dataset: RecordedDataset
    frames: np.ndarray  # int64 [M]
    spec: EnvSpec  # what observations and chunks look like
    cache: FrameCache
    source: int = 0

    def __len__(self) -> int:
        return len(self.frames)

    @classmethod
    def concatenate(cls, parts: Sequence[RecordedChunks]) -> RecordedChunks:
        first, frames = parts[0], np.concatenate([part.frames for part in parts])
        return cls(first.dataset, frames, first.spec, first.cache, first.source)

    @property
    def proprio(self) -> Tensor:
        return torch.from_numpy(self.dataset.state[self._seen(self.frames)]).flatten(1)

    def _seen(self, frames: np.ndarray) -> np.ndarray:
        """Returns the frames that an observation shows, [M, env.history], oldest first; the first one is repeated."""
        return self.dataset.window(frames, range(1 - self.spec.history, 1))[0]

    def prefetch(self, index: Sequence[int] | Tensor) -> None:
        seen = self._seen(self.frames[np.asarray(index, np.int64)])
        for camera in self.spec.cameras:
            self.cache.request(self.dataset, camera, seen.reshape(-1))

    def rows(self, index: Sequence[int] | Tensor, images: bool = True) -> Demonstrations:
        frames = self.frames[np.asarray(index, np.int64)]
        seen = self._seen(frames)
        seen = seen if self.spec.history > 1 else seen[:, 0]
        parts = self.spec.of_kind(FeatureKind.state)
        vectors = torch.from_numpy(self.dataset.state[seen]).split([part.shape[-1] for part in parts], -1)
        pictures = {name: self.cache.get(self.dataset, name, seen) for name in self.spec.cameras if images}
        observation = Observation(
            state={part.name: vector for part, vector in zip(parts, vectors, strict=True)},
            instruction=tuple(self.dataset.task(int(frame)) for frame in frames),
            images={name: torch.from_numpy(shown) for name, shown in pictures.items()},
        )
        steps, is_pad = self.dataset.window(frames, range(self.spec.chunk))
        actions = torch.from_numpy(self.dataset.columns[ACTION][steps])
        return Demonstrations(observation, actions, None, torch.from_numpy(is_pad), self.source)
