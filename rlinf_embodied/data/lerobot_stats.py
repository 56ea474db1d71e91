"""Statistics of LeRobot datasets: of each episode (meta/episodes) and of all frames (meta/stats.json).

Per feature: min, max, mean, std over frames, and their number, [D] for vectors, [1] for numbers, [3, 1, 1] for
images, whose values are shares of 255.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Statistics = dict[str, list]  # by "min", "max", "mean", "std", "count"


def statistics(values: np.ndarray) -> Statistics:
    """Returns the statistics of a feature over frames.

    Args:
        values: vectors [T, D], numbers [T], or images uint8 [T, height, width, 3].
    """
    images = values.ndim == 4
    if images:
        return {name: np.asarray(found)[:, None, None].tolist() for name, found in _of_colours(values).items()} | {
            "count": [len(values)]
        }
    columns = values.astype(np.float64).reshape(len(values), -1)
    found = {"min": columns.min(0), "max": columns.max(0), "mean": columns.mean(0), "std": columns.std(0)}
    return {name: column.tolist() for name, column in found.items()} | {"count": [len(values)]}


def _of_colours(images: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of the three colours [3]; from counts of values: a copy in floats is eight times as large."""
    counts = np.stack([np.bincount(images[..., k].ravel(), minlength=256) for k in range(3)]).astype(np.float64)
    values = np.arange(256) / 255.0
    number = counts.sum(1)
    mean = counts @ values / number
    seen = [values[row > 0] for row in counts]
    return {
        "min": np.array([row.min() for row in seen]),
        "max": np.array([row.max() for row in seen]),
        "mean": mean,
        "std": np.sqrt(np.maximum(counts @ values**2 / number - mean**2, 0.0)),
    }


def joined(parts: Sequence[Mapping[str, list]]) -> Statistics:
    """Returns the statistics of all frames of several episodes, from those of each."""
    arrays = {name: np.array([part[name] for part in parts]) for name in ("min", "max", "mean", "std")}
    weights = np.array([part["count"][0] for part in parts], dtype=np.float64)
    shaped = (weights / weights.sum()).reshape(-1, *[1] * (arrays["mean"].ndim - 1))
    mean = (arrays["mean"] * shaped).sum(0)
    square = ((arrays["std"] ** 2 + (arrays["mean"] - mean) ** 2) * shaped).sum(0)
    found = {"min": arrays["min"].min(0), "max": arrays["max"].max(0), "mean": mean, "std": np.sqrt(square)}
    return {name: value.tolist() for name, value in found.items()} | {"count": [int(weights.sum())]}
