"""From spans to a profile: who counts, per what, and how the grid is filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import cluster, embodied

from rlinf_embodied.planning.measurement import Measurements, Memory, Sample, fill, grid, profile_dict, samples
from rlinf_embodied.planning.probes import Probe, collocated, disaggregated, shortened
from rlinf_embodied.planning.profile import parse_profile
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Workflow


def workflow() -> Workflow:
    work = embodied((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), blocks=8, steps=20)[0]
    object.__setattr__(work.loops["rollout"], "typical_steps", 10)
    return work


def span(name: str, worker: int, seconds: float) -> Span:
    return Span(name, name.split(".")[0], worker, "cpu", 0.0, seconds)


def test_the_worker_that_took_longest_counts_for_both_sides_of_a_loop() -> None:
    probe = Probe("x", workflow(), collocated(workflow(), 2), cluster(2))
    spans = [span("env.open", 0, 2.0), span("env.step", 0, 6.0), span("policy.step", 0, 2.0)]  # 10 s
    spans += [span("env.step", 1, 4.0), span("policy.step", 1, 4.5), span("actor.run", 0, 3.0)]  # 8.5 s
    found = {s.stage: s for s in samples(probe, workflow(), workflow(), spans, {"env": 1, "policy": 1})}
    assert found["env"] == Sample("env", 4, 2, pytest.approx(8.0 / 20))
    assert found["policy"] == Sample("policy", 4, 2, pytest.approx(2.0 / 20))
    assert found["actor"] == Sample("actor", 4, 2, pytest.approx(3.0))


def test_apart_each_side_counts_by_itself_and_a_call_is_a_shard() -> None:
    probe = Probe("x", workflow(), disaggregated(workflow(), 2), cluster(2))
    spans = [span("env.step", 0, 8.0), span("policy.step", 1, 4.0), span("actor.run", 1, 3.0), span("actor.run", 0, 2)]
    found = {s.stage: s for s in samples(probe, workflow(), workflow(), spans, {"env": 2, "policy": 2})}
    assert found["env"] == Sample("env", 4, 1, pytest.approx(8.0 / (20 * 2 * 2)))  # steps, shards, rounds
    assert found["policy"] == Sample("policy", 4, 1, pytest.approx(4.0 / 80))
    assert found["actor"].seconds == pytest.approx(3.0)


def test_behind_a_shortened_rollout_a_stage_has_less_to_do_than_behind_a_whole_one() -> None:
    probe, run = Probe("x", workflow(), collocated(workflow(), 1), cluster(2)), shortened(workflow(), 0.5)
    spans = [span("env.step", 0, 5.0), span("policy.step", 0, 1.0), span("actor.run", 0, 3.0)]
    found = {s.stage: s.seconds for s in samples(probe, run, workflow(), spans, {})}
    assert (found["env"], found["actor"]) == (pytest.approx(0.5), pytest.approx(6.0))
    opened = samples(probe, run, workflow(), [*spans, span("env.open", 0, 2.0)], {})[0]
    assert opened.seconds == pytest.approx((2.0 + 10.0) / 20)  # once per rollout, however short it is


def test_switches_and_weights_are_not_work() -> None:
    probe = Probe("x", workflow(), collocated(workflow(), 1), cluster(2))
    spans = [span("env.step", 0, 5.0), span("policy.step", 0, 1.0), span("actor.run", 0, 3.0)]
    more = [span("actor.offload", 0, 7.0), span("policy.install_weights", 0, 7.0), span("env.onload", 0, 7.0)]
    assert samples(probe, workflow(), workflow(), spans + more, {}) == samples(probe, workflow(), workflow(), spans, {})


def test_cells_are_kept_and_the_others_filled() -> None:
    # on one device 4 s at 4 items and 6 s at 8; two at once are a quarter slower
    table = fill({(4, 1): 4.0, (8, 1): 6.0, (4, 2): 5.0}, [4, 8], [1, 2])
    assert np.allclose(table, [[4.0, 5.0], [6.0, 7.5]])


def test_what_has_one_point_on_a_device_grows_in_proportion() -> None:
    assert np.allclose(fill({(8, 1): 6.0, (4, 2): 3.3}, [4, 8], [1, 2]), [[3.0, 3.3], [6.0, 6.6]])
    assert grid({(3, 1): 1.0}) == ([3, 6], [1])  # a slope needs two points


def test_between_and_below_points_times_are_linear_but_never_less_than_in_proportion() -> None:
    table = fill({(4, 1): 4.0, (8, 1): 12.0, (6, 2): 9.0, (1, 2): 1.0}, [1, 4, 6, 8], [1, 2])
    assert [row[0] for row in table] == pytest.approx([1.0, 4.0, 8.0, 12.0])  # the line would be below zero at 1


def test_a_profile_of_measurements_is_one_that_can_be_read() -> None:
    measured = Measurements()
    for seconds in (0.5, 0.4, 0.9):
        measured.samples += [Sample(s, 4, 1, seconds) for s in ("env", "policy", "actor")]
    measured.memory["env"] = Memory(resident={(4, 1): 100.0}, working={(4, 1): 7.0})
    measured.memory["actor"] = Memory(resident={(4, 1): 50.0}, offloaded_bytes=5.0, offload_s=0.25, onload_s=0.5)
    measured.rounds, measured.edge_bytes_per_item = [1, 2], {("env", "policy"): 12.0}
    measured.links = {"latency_s": 0.002, "within_node_bytes_per_s": 1e8}
    profile = parse_profile(profile_dict("x", workflow(), "cpu", measured, {"config": "a"}))
    assert float(profile.stages["env"].call_s(4, 1)) == pytest.approx(0.5)  # the median
    assert (profile.stages["env"].offloaded_bytes, profile.stages["env"].stays) == (100.0, True)  # it has no offload
    assert not profile.stages["actor"].stays
    assert (profile.stages["actor"].offloaded_bytes, profile.stages["actor"].onload_s) == (5.0, 0.5)
    assert profile.workload is not None
    assert (profile.workload.expected_rounds, profile.workload.num_items) == (1.5, 8)
    assert profile.links is not None
    assert profile.links.latency_s == 0.002


def half_as_fast(graph: Workflow, actor_s: tuple[float, float]) -> Sample:
    """Returns what is filed of an actor on two workers, of which the second one is at half speed."""
    groups = cluster(2).node_groups()
    one = replace(groups[0], devices_per_node=1)
    unlike = replace(cluster(2), groups=(one, replace(one, beside=0, speed=0.5)))
    probe = Probe("x", graph, collocated(graph, 2), unlike)
    spans = [span(f"{stage}.step", worker, 1.0) for stage in ("env", "policy") for worker in (0, 1)]
    spans += [span("actor.run", worker, seconds) for worker, seconds in enumerate(actor_s)]
    return {s.stage: s for s in samples(probe, graph, graph, spans, {})}["actor"]


def test_a_device_that_is_known_to_be_slow_makes_no_stage_slow() -> None:
    """Its 6 s are 3 s of an alike device, which is less than what worker 0 took."""
    apart = replace(
        workflow(), stages={**workflow().stages, "actor": replace(workflow().stages["actor"], collective=False)}
    )
    assert half_as_fast(apart, (4.0, 6.0)) == Sample("actor", 4, 2, pytest.approx(4.0))


def test_workers_that_wait_for_a_slow_one_are_not_slow_themselves() -> None:
    """Both take 6 s, worker 0 because it waits: two devices of speed 1 would take 3 s."""
    graph = workflow()
    together = replace(graph, stages={**graph.stages, "actor": replace(graph.stages["actor"], collective=True)})
    assert half_as_fast(together, (6.0, 6.0)) == Sample("actor", 4, 2, pytest.approx(3.0))
