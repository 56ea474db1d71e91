"""Statistics of a dataset's features, as LeRobot computes and stores them in meta/stats.json.

The statistics of each episode are computed separately and then combined, so one pass over the data is enough:

    min, max                    of all frames
    mean, std                   of all frames (population)
    q01, q10, q50, q90, q99     means of the episodes' quantiles, weighted by their frames, each from a histogram
    count                       frames
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlinf_embodied.errors import DataError

Statistics = dict[str, np.ndarray]  # by name, float64 [D], or [3, 1, 1] of images in [0, 1]; "count" is [1]
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_BINS, _MARGIN = 5000, 1e-10  # of the histograms
_SMALL, _TARGET = 300, 150  # pixels: larger images are subsampled to about the second number


def vector_statistics(values: np.ndarray) -> Statistics:
    """Returns the statistics of one episode of vectors [T, ...] or numbers [T], treated as [T, 1]."""
    columns = values.astype(np.float64).reshape(len(values), *(values.shape[1:] or (1,)))
    moments = {"min": columns.min(0), "max": columns.max(0), "mean": columns.mean(0), "std": columns.std(0)}
    flat = columns.reshape(len(columns), -1)
    quantiles = np.stack([_quantiles(column) for column in flat.T], 1).reshape(-1, *columns.shape[1:])
    return moments | dict(zip(QUANTILES, quantiles, strict=True)) | {"count": np.array([len(values)])}


def image_statistics(images: np.ndarray) -> Statistics:
    """Returns the statistics of the colours of one episode's images, uint8 [T, height, width, 3], scaled to [0, 1]."""
    images = images[sampled_frames(len(images))]
    if max(images.shape[1:3]) >= _SMALL:
        step = max(images.shape[1:3]) // _TARGET
        images = images[:, ::step, ::step]
    of_pixels = vector_statistics(images.reshape(-1, images.shape[-1]))
    shaped = {name: column[:, None, None] / 255.0 for name, column in of_pixels.items() if name != "count"}
    return shaped | {"count": np.array([len(images)])}


def sampled_frames(length: int) -> list[int]:
    """Returns the frames of an episode whose images are measured: all up to 100, a smaller share of longer ones."""
    number = max(min(length, 100), min(int(length**0.75), 10_000))
    return np.round(np.linspace(0, length - 1, number)).astype(int).tolist()


def combine(parts: Iterable[Statistics]) -> Statistics:
    """Returns the statistics of several episodes, or datasets, as one."""
    parts = list(parts)
    count = np.array([part["count"][0] for part in parts], np.float64)
    mean_of = lambda values: np.tensordot(count, np.stack(values), 1) / count.sum()  # noqa: E731
    mean = mean_of([part["mean"] for part in parts])
    moments = {
        "min": np.min([part["min"] for part in parts], 0),
        "max": np.max([part["max"] for part in parts], 0),
        "mean": mean,
        "std": np.sqrt(mean_of([part["std"] ** 2 + (part["mean"] - mean) ** 2 for part in parts])),
        "count": np.array([int(count.sum())]),
    }
    shared = [name for name in QUANTILES if all(name in part for part in parts)]
    return moments | {name: mean_of([part[name] for part in parts]) for name in shared}


def _quantiles(values: np.ndarray) -> np.ndarray:
    """Returns the five quantiles of values [T], each linear within its bin of a histogram."""
    if len(values) == 1:
        return np.repeat(values, len(QUANTILES))
    edges = np.linspace(values.min() - _MARGIN, values.max() + _MARGIN, _BINS + 1)
    below = np.cumsum(np.histogram(values, edges)[0])
    quantiles = []
    for share in QUANTILES.values():
        k = int(np.searchsorted(below, share * len(values)))
        if k in (0, _BINS):  # LeRobot does not interpolate within the first bin
            quantiles.append(edges[k])
            continue
        inside = below[k] - below[k - 1]
        quantiles.append(edges[k] + (share * len(values) - below[k - 1]) / inside * (edges[k + 1] - edges[k]))
    return np.array(quantiles)


def read_statistics(path: Path, where: str) -> dict[str, Statistics]:
    """Returns the statistics in a stats.json, by feature; {} if there is none.

    Raises:
        DataError: the file is damaged; `where` names the dataset.
    """
    if not path.exists():
        return {}
    try:
        return parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{where}, but {path} cannot be read ({error}): delete it, then they are computed") from error


def parsed(content: Mapping[str, Mapping[str, Sequence]]) -> dict[str, Statistics]:
    """Returns statistics from their JSON form."""
    return {key: {name: np.asarray(v, np.float64) for name, v in kinds.items()} for key, kinds in content.items()}
