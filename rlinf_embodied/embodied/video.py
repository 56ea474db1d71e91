"""Images to mp4, one file per episode and one with all episodes side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np


def write_mp4(path: Path, frames: Sequence[np.ndarray], fps: int = 20) -> None:
    """Writes frames, uint8 [S, S, 3] with S even, as H.264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20", "preset": "veryfast"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def tile(episodes: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns frames that show all episodes in a grid; an episode that is over stands still."""
    columns = math.ceil(math.sqrt(len(episodes)))
    rows = math.ceil(len(episodes) / columns)
    blank = np.zeros_like(episodes[0][0])
    frames = []
    for k in range(max(len(frames) for frames in episodes)):
        cells = [frames[min(k, len(frames) - 1)] for frames in episodes]
        cells += [blank] * (rows * columns - len(cells))
        lines = [np.concatenate(cells[r * columns : (r + 1) * columns], 1) for r in range(rows)]
        frames.append(np.concatenate(lines, 0))
    return frames
