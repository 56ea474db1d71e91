"""The wire's benchmark sends what it says, through the real executor."""

from __future__ import annotations

import pytest

from experiments.bench import wire
from rlinf_embodied.execution.meter import payload_bytes
from rlinf_embodied.flow.plan import Spatial
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession


def test_the_observation_is_nested_and_has_ten_megabytes() -> None:
    value = wire.observation()
    assert 9.5e6 < payload_bytes(value) < 10.5e6
    assert payload_bytes(wire.observation_as_numpy()) == payload_bytes(value)
    assert value["state"]["tcp"]["pose"].shape == (200, 7)
    assert payload_bytes(wire.small()) < 100


@pytest.mark.parametrize("granularity", [0, 1])
def test_a_sink_gets_every_block_of_its_source_once(granularity: int) -> None:
    build = wire.pair(SerialSession(), wire.Load(16), wire.Load(), 4, granularity)
    executor = build()
    tree = executor.plan.tree
    assert isinstance(tree, Spatial)
    assert tree.granularity == granularity
    assert sum(executor.run(StepContext(0)).all_of("sink", int)) == wire.NUM_BLOCKS
    assert {str(route.choice.used) for route in executor.routes} == {"in_process"}  # a serial session


def test_an_unknown_part_is_answered_before_anything_starts(capsys) -> None:
    assert wire.BENCHMARK.main(["parts=hops,nonsense"]) == 2
    assert "parts has 'nonsense', but there are hops" in capsys.readouterr().err
