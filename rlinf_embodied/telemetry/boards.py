"""Destinations of metrics other than metrics.jsonl: TensorBoard and Weights & Biases, which also get videos."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image
from torch import Tensor

from rlinf_embodied.config import RunConfig
from rlinf_embodied.config.checks import require

BINS = 40  # of a histogram
_FRAMES, _SIDE = 60, 160  # maximum frames, and pixels per side, of a video's GIF in TensorBoard


class Histogram(float):
    """Counts of values in BINS equal bins from -limit to limit; as a float, approximately their mean."""

    counts: np.ndarray  # [BINS]
    edges: np.ndarray  # [BINS + 1]

    def __new__(cls, counts: Sequence[float], limit: float) -> Histogram:
        edges = np.linspace(-limit, limit, BINS + 1)
        self = super().__new__(cls, np.dot(counts, (edges[1:] + edges[:-1]) / 2) / max(1.0, sum(counts)))
        self.counts, self.edges = np.asarray(counts), edges
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Histogram, (self.counts, self.edges[-1])

    @staticmethod
    def count(values: Tensor, limit: float) -> Tensor:
        """Returns counts [BINS] of values; the outermost bins include values beyond the limits; NaN is not counted."""
        return values.float().clamp(-limit, limit).histc(BINS, -limit, limit)


class TensorBoard:
    """Event files in <run folder>/tensorboard; the first step hides older events of this step or later ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer = None

    def log(self, values: Mapping[str, float], step: int, videos: Mapping[str, Path] | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import

        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        writer = self._writer
        for name, value in values.items():
            if isinstance(value, Histogram):
                (low, *limits), counts, number = value.edges.tolist(), value.counts.tolist(), float(value.counts.sum())
                writer.add_histogram_raw(name, low, limits[-1], number, number * value, 0.0, limits, counts, step)
            else:
                writer.add_scalar(name, value, step)
        for name, path in (videos or {}).items():
            value = Summary.Value(tag=name, image=Summary.Image(encoded_image_string=_gif(path)))
            writer._get_file_writer().add_summary(Summary(value=[value]), step)
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_RUN_ID ...) apply."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Starts the run, or continues that of WANDB_RUN_ID; `config` is displayed as its configuration."""
        name = os.environ.get("WANDB_NAME", folder.name)
        project = os.environ.get("WANDB_PROJECT", "rlinf_embodied")
        self._library = importlib.import_module("wandb")
        self._run = self._library.init(project=project, name=name, dir=str(folder), config=dict(config))

    def log(self, values: Mapping[str, float], step: int, videos: Mapping[str, Path] | None = None) -> None:
        logged: dict[str, object] = dict(values)
        for name, value in values.items():
            if isinstance(value, Histogram):
                logged[name] = self._library.Histogram(np_histogram=(value.counts, value.edges))
        for name, path in (videos or {}).items():
            logged[name] = self._library.Video(str(path), format="mp4")
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | Wandb  # displays the metrics of a run by global step; values are finite


def require_boards(run: RunConfig) -> None:
    """Raises ConfigError if a board of a run is not installed."""
    installed = not run.wandb or importlib.util.find_spec("wandb") is not None
    action = "pip install 'rlinf-embodied[wandb]', or use run.wandb=false"
    require(installed, "run.wandb", run.wandb, "wandb is not installed", action)


def start_boards(folder: Path, run: RunConfig, config: Mapping[str, object]) -> list[Board]:
    """Returns the boards of a run; `config` is displayed as its configuration."""
    boards: list[Board] = [TensorBoard(folder)] if run.tensorboard else []
    return [*boards, Wandb(folder, config)] if run.wandb else boards


def _gif(path: Path) -> bytes:
    """Returns a video as an animated GIF of the same duration, with fewer and smaller frames."""
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        frames = [frame.to_image() for frame in container.decode(video=0)]
    stride = -(-len(frames) // _FRAMES)
    images, stream = frames[::stride], io.BytesIO()
    for image in images:
        image.thumbnail((_SIDE, _SIDE))
    images = [image.quantize(method=Image.Quantize.FASTOCTREE) for image in images]  # 20 times as fast as the default
    milliseconds = round(1000 * stride / float(rate or 20))
    images[0].save(stream, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    return stream.getvalue()
