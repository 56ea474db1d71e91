"""The measurement of the driver makes the calls that it says."""

from __future__ import annotations

import pytest

from experiments.bench.driver import __main__ as driver
from experiments.bench.harness import Run
from rlinf_embodied.errors import ConfigError


@pytest.mark.ray
def test_every_call_of_an_iteration_is_counted(ray_cluster) -> None:
    found = driver.measure_one(2, driver.Options(iterations=1, chunk_steps=3))
    sides, shards = 2, 2
    assert found.calls == shards * (1 + sides) + 1 + 2  # open and close; the steps, which are relayed; training on both
    assert found.driver_s.count == 1
    assert found.driver_s.low > 0


@pytest.mark.parametrize("workers", ["3", "0", "many"])
def test_workers_are_even_numbers(workers) -> None:
    with pytest.raises(ConfigError, match=r"workers is .*a list of even numbers"):
        driver.measure(Run(driver.Options(workers=workers), [], {}))
