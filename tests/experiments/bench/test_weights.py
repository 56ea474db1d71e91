"""The measurement of weights sends what it says, to everybody, and the driver holds none of it."""

from __future__ import annotations

from typing import cast

import pytest

from experiments.bench.harness import Run
from experiments.bench.weights import __main__ as weights
from rlinf_embodied.errors import ConfigError


@pytest.mark.slow
@pytest.mark.ray
def test_every_way_reaches_every_worker(ray_cluster) -> None:
    found = weights.measure(Run(weights.Options(gb=0.02, workers=2, rounds=1), [], {})).content
    content = cast("dict[str, dict[str, float]]", found)
    assert content["seconds"].keys() == {"weights", "copied", "mapped"}
    assert {"weights holder.export_weights", "weights holder.install_weights"} <= content["parts_s"].keys()
    assert content["driver_grew_by_mb"]["weights"] < 10  # of 20


@pytest.mark.parametrize("options", [{"gb": 0.0}, {"workers": 0}, {"rounds": 0}])
def test_what_cannot_be_measured_is_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="all are positive"):
        weights.measure(Run(weights.Options(**options), [], {}))
