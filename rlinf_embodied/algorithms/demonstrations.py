"""Demonstrations: chunks of actions with the observations before them, in memory or read on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import ACTION_IS_PAD

_ROWS = 64  # rows per call without a gradient
_AHEAD = 4  # number of minibatches whose images are decoded in advance


class Chunks:
    """M chunks of one data block, in memory or on disk."""

    __slots__ = ()
    source: int  # which of the config's sources they come from

    def __len__(self) -> int:
        raise NotImplementedError

    @classmethod
    def concatenate(cls, parts: Sequence[Any]) -> Self:
        """Returns the chunks of one source in several parts, in order."""
        raise NotImplementedError

    @property
    def lengths(self) -> dict[int, int]:
        """The number of chunks of each source, in order."""
        return {self.source: len(self)}

    @property
    def proprio(self) -> Tensor:
        """Proprioception at the beginning of every chunk, float32 [M, P]."""
        raise NotImplementedError

    @property
    def privileged(self) -> Tensor | None:
        """The simulator's state at the beginning of every chunk, float32 [M, Q]; None if it was not recorded."""
        return None

    def rows(self, index: Sequence[int] | Tensor, images: bool = True) -> Demonstrations:
        """Returns the chunks at `index`, in this order, with or without their images."""
        raise NotImplementedError

    def prefetch(self, index: Sequence[int] | Tensor) -> None:
        """Starts to load chunks that will be read soon."""

    def in_parts(self) -> Iterator[Demonstrations]:
        """Yields all chunks in parts of at most _ROWS."""
        for k in range(0, len(self), _ROWS):
            self.prefetch(range(min(k + _ROWS, len(self)), min(k + 2 * _ROWS, len(self))))
            yield self.rows(range(k, min(k + _ROWS, len(self))))


@dataclass(slots=True)
class Demonstrations(Chunks):
    """Chunks in memory."""

    observation: Observation  # M rows
    actions: Tensor  # float32 [M, C, A]
    object_positions: Tensor | None = None  # float32 [M, 3]
    is_pad: Tensor | None = None  # bool [M, C], actions beyond the episode's end; None: there are none
    source: int = 0

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def concatenate(cls, parts: Sequence[Demonstrations]) -> Demonstrations:
        positions, is_pad = [part.object_positions for part in parts], [part.is_pad for part in parts]
        if any(mask is not None for mask in is_pad):
            no_padding = lambda part: torch.zeros(part.actions.shape[:2], dtype=torch.bool)  # noqa: E731
            is_pad = [no_padding(part) if part.is_pad is None else part.is_pad for part in parts]
        return cls(
            Observation.concatenate([part.observation for part in parts]),
            torch.cat([part.actions for part in parts]),
            None if None in positions else torch.cat(cast(list[Tensor], positions)),
            None if None in is_pad else torch.cat(cast(list[Tensor], is_pad)),
            parts[0].source,
        )

    @property
    def proprio(self) -> Tensor:
        return self.observation.proprio

    @property
    def privileged(self) -> Tensor | None:
        return self.observation.privileged

    def rows(self, index: Sequence[int] | Tensor, images: bool = True) -> Demonstrations:
        index = index.tolist() if isinstance(index, Tensor) else list(index)
        pick = lambda column: None if column is None else column[index]  # noqa: E731
        observation, actions = self.observation if images else self.observation.without_images(), self.actions[index]
        observation = observation.rows(index)
        return Demonstrations(observation, actions, pick(self.object_positions), pick(self.is_pad), self.source)

    def targets(self, device: torch.device | str, helpers: bool = False) -> dict[str, Tensor]:
        """Returns the further targets of an imitation loss; `helpers` includes those that train the stem."""
        columns = {ACTION_IS_PAD: self.is_pad, "object_position": self.object_positions if helpers else None}
        return {name: column.to(device) for name, column in columns.items() if column is not None}


@dataclass(frozen=True, slots=True)
class _Several(Chunks):
    """Chunks of several sources, one after the other."""

    parts: Sequence[Chunks]
    source: int = -1

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @classmethod
    def concatenate(cls, parts: Sequence[Chunks]) -> _Several:
        return cls(parts)

    @property
    def lengths(self) -> dict[int, int]:
        return {part.source: len(part) for part in self.parts}

    @property
    def proprio(self) -> Tensor:
        return torch.cat([part.proprio for part in self.parts])

    @property
    def privileged(self) -> Tensor | None:
        columns = [part.privileged for part in self.parts]
        return None if None in columns else torch.cat(cast(list[Tensor], columns))

    def _split(self, index: Sequence[int] | Tensor) -> Iterator[tuple[Chunks, Tensor, Tensor]]:
        """Yields each part with its local indices of the chunks at `index`, and their positions within `index`."""
        indices, first = torch.as_tensor(index), 0
        for part in self.parts:
            positions = ((indices >= first) & (indices < first + len(part))).nonzero()[:, 0]
            if len(positions):
                yield part, indices[positions] - first, positions
            first += len(part)

    def rows(self, index: Sequence[int] | Tensor, images: bool = True) -> Demonstrations:
        pieces = [(part.rows(local, images), positions) for part, local, positions in self._split(index)]
        order = torch.cat([positions for _, positions in pieces]).argsort()
        return Demonstrations.concatenate([part for part, _ in pieces]).rows(order)

    def prefetch(self, index: Sequence[int] | Tensor) -> None:
        for part, local, _ in self._split(index):
            part.prefetch(local)


def join(parts: Sequence[Chunks]) -> Chunks:
    """Concatenates demonstrations, source by source."""
    of_source: dict[int, list[Chunks]] = {}
    for part in parts:
        of_source.setdefault(part.source, []).append(part)
    joined = [type(group[0]).concatenate(group) for group in of_source.values()]
    return joined[0] if len(joined) == 1 else _Several(joined)


def announced(batches: Iterator[dict[int, Tensor]], data: Mapping[int, Chunks]) -> Iterator[dict[int, Tensor]]:
    """Yields minibatches, each after prefetching of the next _AHEAD has started."""
    waiting: deque[dict[int, Tensor]] = deque()
    for rows in batches:
        for block, index in rows.items():
            data[block].prefetch(index)
        waiting.append(rows)
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
    yield from waiting
