"""Writes videos."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def write_video(path: Path, frames: Iterable[np.ndarray], fps: int, options: Mapping[str, str]) -> None:
    """Writes frames, uint8 [H, W, 3] with H and W even, as H.264; `options` are those of x264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options=dict(options))
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(frames):
            if number == 0:
                stream.height, stream.width = image.shape[:2]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
