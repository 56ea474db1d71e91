"""What a run keeps in the object store, counted by hand; and what Ray says that values take there."""

from __future__ import annotations

import pytest
import torch
from placements import leaves

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.session import SerialSession, Session, Stored
from rlinf_embodied.runtime.transport import Route, handover, routes
from rlinf_embodied.training.running import shortage, store_need
from rlinf_embodied.workflow.graph import Edge, StageSpec, WeightEdge, Workflow

WEIGHTS = ("learner", "sampler")


def workflow() -> Workflow:
    stages = {name: StageSpec(name, "fakes.Counter", None) for name in ("sampler", "scorer", "learner")}
    edges = (Edge("sampler", "scorer", 10.0), Edge("scorer", "learner", 30.0))
    return Workflow("three", 4, stages, edges, (WeightEdge(*WEIGHTS),), items_per_block=5)


def routes_with(learner: list[int]) -> list[Route]:
    """Sampler on worker 0, scorer on both, two blocks each; the learner where it is said."""
    devices = {"sampler": [0], "scorer": [0, 1], "learner": learner}
    plan, cluster = resolve("p", leaves(**devices), 2, workflow()), Cluster("test", "cpu", 2, 2, 0)
    return routes(workflow(), plan, cluster, handover(workflow(), plan, cluster))


@pytest.mark.parametrize(
    ("learner", "staleness", "need"),
    [
        # ten items of the sampler's go to worker 1, ten of the scorer's to the learner; weights go to worker 0
        ([1], 0, (2 * 4000.0, 700.0, 10 * 10 + 10 * 30)),
        ([1], 2, (2 * 4000.0, 3 * 700.0, 3 * (10 * 10 + 10 * 30))),
        # the sampler's worker hosts the learner: no weights travel
        ([0], 0, (2 * 4000.0, 0.0, 10 * 10 + 10 * 30)),
    ],
)
def test_what_is_kept_is_what_leaves_its_worker_and_two_snapshots(
    learner: list[int], staleness: int, need: tuple[float, ...]
) -> None:
    assert tuple(store_need(workflow(), routes_with(learner), staleness, 4000.0, {WEIGHTS: 700.0}).values()) == need


def test_weights_that_nobody_measured_are_at_most_a_snapshot() -> None:
    assert store_need(workflow(), routes_with([1]), 0, 4000.0, {})["weights on their way"] == 4000.0


def test_a_store_that_is_too_small_is_told_with_the_size_to_set() -> None:
    need = {"two snapshots": 60e6, "weights on their way": 20e6, "data": 0.0}
    assert shortage(need, 80e6) == ""
    said = shortage(need, 79e6)
    assert "80 MB" in said
    assert "room for 79 MB" in said
    assert "two snapshots 60 MB, weights on their way 20 MB" in said
    assert "data" not in said
    assert "cluster.object_store_bytes=110000000" in said  # a quarter more than 80 MB, rounded up


def test_one_process_has_no_store() -> None:
    assert SerialSession().stored([object()]) is None


@pytest.mark.ray
def test_ray_says_what_values_take_and_how_large_the_store_is(ray_session: Session) -> None:
    import ray

    refs = [ray.put(torch.zeros(size // 4).numpy()) for size in (3_000_000, 5_000_000)]
    stored = ray_session.stored(refs)
    assert isinstance(stored, Stored)
    assert 8_000_000 <= stored.taken <= 8_100_000
    assert stored.room == pytest.approx(256 << 20, rel=0.01)  # as conftest.py starts it
