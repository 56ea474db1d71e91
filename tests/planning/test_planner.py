"""Faults that planners have had, each with the arithmetic that shows its absence; what is said when nothing fits."""

import json

import pytest
from plan_cases import cluster, embodied, graph, profile, stage

from rlinf_embodied.cluster.hardware import WAITING, Cluster, Links, NodeGroup, described_cluster, with_waiting
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.planning import cost
from rlinf_embodied.planning.allocations import make_allocations
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan, Spatial, Temporal, leaves, nodes, resolve, resolve_on
from rlinf_embodied.planning.planner import Mode, find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import FORMAT, parse_profile
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.workflow.graph import WHOLE, Edge, StageSpec, Workflow


def seconds(pricer: Pricer, tree) -> float:
    return simulate(tree, pricer, traced=False).iteration_s


# ----------------------------------------------------------------------------------------------------- loops and splits
def test_a_split_is_not_made_cheaper_by_the_number_of_envs() -> None:
    # 8 envs, 4 steps, e = 1 s per env, p = 1 s per env.  Together on 2 devices: 4 * (4 + 4) = 32 s, then 4 s of actor.
    # Apart, one device each, two shards of 4: 4 * 2 * 4 + 4 = 36 s, then 4 s.  Taking turns wins.
    work, measured = embodied((0, 1), (0, 1), (0, 1))
    pricer = Pricer(work, measured, cluster(2))
    together, apart = find_plans(pricer)[0], find_plans(pricer, Mode.hybrid)[0]
    assert (together.shape, apart.shape) == (
        "(rollout collocated > actor)",
        "(rollout disaggregated > actor)",
    )
    assert together.iteration_s == pytest.approx(36.0)
    assert apart.iteration_s == pytest.approx(40.0)


def test_equal_halves_never_win_by_overlap_alone() -> None:
    for e, p in ((1, 1), (1, 3), (3, 1), (2, 5)):
        work, measured = embodied((0, e), (0, p), (0, 1))
        pricer = Pricer(work, measured, cluster(4))
        halves = LoopNode("rollout", (Leaf("env", (0, 1)), Leaf("policy", (2, 3))), 2)
        together = LoopNode("rollout", (Leaf("env", (0, 1, 2, 3)), Leaf("policy", (0, 1, 2, 3))), 1)
        actor = Leaf("actor", (0, 1, 2, 3))
        assert seconds(pricer, Temporal((together, actor))) <= seconds(pricer, Temporal((halves, actor)))


def test_one_side_may_get_exactly_one_device() -> None:
    # A simulator whose time is flat (4 s) wants one device, however many there are: the policy gets the other five.
    work, measured = embodied((4, 0), (0, 12), (0, 0.01), blocks=30, steps=6)
    apart = find_plans(Pricer(work, measured, cluster(6)), Mode.hybrid)[0].tree
    devices = {leaf.stage: len(leaf.devices) for leaf in leaves(apart)}
    assert (devices["env"], devices["policy"]) == (1, 5)


def test_a_policy_that_needs_a_device_of_its_own_gets_one() -> None:
    # 70 GB each on 80 GB: the loop's sides cannot share a device, so the split is the plan, with one shard or two
    memory = {"resident_bytes": 70e9, "offload_s": 1.0, "onload_s": 1.0}
    work, measured = embodied((1, 0), (0, 1), (0, 1), blocks=12, env=memory, policy=memory, actor=memory)
    best = find_plans(Pricer(work, measured, cluster(4, 80e9)))[0]
    loop = next(node for node in nodes(best.tree) if isinstance(node, LoopNode))
    assert [len(leaf.devices) for leaf in loop.stages] == [1, 3]
    assert loop.shards == 2


def test_the_loop_formula_is_the_fifo_schedule() -> None:
    # H = 3, P = 2, e = 2, p = 1: the simulator is busy 3 * 2 * 2 = 12 s after the first answer; 13 s with P = 1: 9 s
    assert cost.loop_disaggregated_s(3, 2, 2.0, 1.0, 0.0, 0.0, 0.0) == pytest.approx(13.0)
    assert cost.loop_disaggregated_s(3, 1, 2.0, 1.0, 0.0, 0.0, 0.0) == pytest.approx(9.0)
    assert cost.loop_disaggregated_s(3, 1, 2.0, 1.0, 0.5, 0.5, 4.0) == pytest.approx(9 + 3 * 1 + 0.5 + 4)
    assert cost.loop_collocated_s(3, 1, 2.0, 1.0, 4.0) == pytest.approx(13.0)


# ------------------------------------------------------------------------------------------------------------ pipelines
def test_a_composite_adds_its_latency_once_not_per_chunk() -> None:
    # three stages of 2, 2 and 2 s per chunk, 4 chunks: 6 s for the first, then one every 2 s: 12 s (not 4 * 6 = 24)
    work = graph("abc", (("a", "b"), ("b", "c")), blocks=4)
    pricer = Pricer(work, profile({name: stage(2, 0) for name in "abc"}), cluster(3))
    tree = Spatial((Spatial((Leaf("a", (0,)), Leaf("b", (1,))), 1), Leaf("c", (2,))), 1)
    assert seconds(pricer, tree) == pytest.approx(12.0)


def test_a_diamond_loses_no_cut() -> None:
    # a -> (b, c) -> d.  b and c side by side: 1 + max(6, 6) + 1 = 8 s; one after the other on both: 1 + 6 + 6 + 1
    work = graph("abcd", (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")), blocks=1)
    measured = profile({"a": stage(1, 0), "b": stage(6, 0), "c": stage(6, 0), "d": stage(1, 0)})
    best = find_plans(Pricer(work, measured, cluster(2)))[0]
    assert best.iteration_s == pytest.approx(8.0)
    assert "(b || c)" in best.shape or "(c || b)" in best.shape


def test_a_long_tail_streams_to_the_next_stage() -> None:
    # half of the answers are ready after 2 of 10 s; verification takes 1 s per block of 2: 10 + 1 instead of 10 + 4 s
    tail = stage(10, 0, finish_quantiles=[[0.0, 0.0], [0.5, 0.2], [1.0, 1.0]])
    work = graph(("generation", "reward"), (("generation", "reward"),), blocks=4)
    pricer = Pricer(work, profile({"generation": tail, "reward": stage(0, 1)}), cluster(2))
    stream = Spatial((Leaf("generation", (0,)), Leaf("reward", (1,))), 1)
    at_once = Spatial((Leaf("generation", (0,)), Leaf("reward", (1,))), WHOLE)
    assert seconds(pricer, stream) == pytest.approx(11.0)
    assert seconds(pricer, at_once) == pytest.approx(14.0)


def test_an_edge_that_needs_the_whole_does_not_stream() -> None:
    work = graph("ab", (("a", "b"),), blocks=4, whole=True)
    pricer = Pricer(work, profile({name: stage(0, 1) for name in "ab"}), cluster(2))
    assert pricer.chunk_counts() == (1,)
    assert not any(isinstance(node, Spatial) and node.granularity for f in find_plans(pricer) for node in nodes(f.tree))


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("stays", [False, True])
def test_what_cannot_leave_a_device_is_never_switched(stays: bool) -> None:
    # 20 + 50 + 50 GB on 80 GB: b and c take turns; a may stay through both, or take turns as well if it can leave
    stages = {name: stage(0, 1) | {"resident_bytes": 50e9, "offload_s": 1.0, "onload_s": 1.0} for name in "bc"}
    stages["a"] = stage(0, 1) | {"resident_bytes": 20e9, "offloaded_bytes": 20e9 if stays else 0.0, "stays": stays}
    pricer = Pricer(graph("abc", (("a", "b"), ("b", "c")), whole=True), profile(stages), cluster(2, 80e9))
    plans = [Plan("p", 2, found.tree) for found in find_plans(pricer)]
    assert plans
    assert any(plan.exclusive()["c"] for plan in plans)
    assert any(plan.exclusive()["a"] for plan in plans) is not stays


def test_what_does_not_fit_together_takes_turns_with_its_switches() -> None:
    # 60 + 60 GB on 80 GB: 4 + 4 s of work on 2 devices, and out and in once each way: 2 * (1 + 2) s
    parked = {"resident_bytes": 60e9, "offload_s": 1.0, "onload_s": 2.0}
    stages = {name: stage(0, 1) | parked for name in "ab"}
    pricer = Pricer(graph("ab", (("a", "b"),), whole=True), profile(stages), cluster(2, 80e9))
    plans = {plan.shape: plan for plan in find_plans(pricer)}
    assert plans["(a >> b)"].iteration_s == pytest.approx(14.0)
    assert plans["(a >> b)"].peak_bytes == pytest.approx(60e9)
    assert "(a > b)" not in plans


def test_devices_of_its_own_can_beat_switching() -> None:
    parked = {"resident_bytes": 60e9, "offload_s": 5.0, "onload_s": 5.0}
    stages = {name: stage(0, 1) | parked for name in "ab"}
    pricer = Pricer(graph("ab", (("a", "b"),)), profile(stages), cluster(2, 80e9))
    best = find_plans(pricer)[0]
    assert best.shape == "(a || b)"
    assert best.iteration_s == pytest.approx(9.0)  # 8 chunks of one block: 1 + 8 * 1


def test_too_little_memory_says_what_is_short_and_for_which_plan() -> None:
    work, measured = embodied((1, 0), (1, 0), (1, 0), policy={"resident_bytes": 100e9})
    with pytest.raises(PlanError, match=r"even .*rollout.* needs 100\.00 GB for .*policy.* 80\.00 GB, 20\.00 GB short"):
        find_plans(Pricer(work, measured, cluster(4, 80e9)))


def test_cores_are_a_resource() -> None:
    work, measured = embodied((1, 0), (1, 0), (1, 0), env={"cores_per_device": 20})
    assert find_plans(Pricer(work, measured, cluster(2, cores=64)))
    with pytest.raises(PlanError, match="do not suit the stages"):
        find_plans(Pricer(work, measured, cluster(4, cores=64)))


# ------------------------------------------------------------------------------------------------------- mixed clusters
def mixed() -> Cluster:
    groups = (
        NodeGroup(kind="gpu", num_nodes=1, devices_per_node=2, memory_bytes=80e9, cores_per_node=8),
        NodeGroup(kind="cpu", num_nodes=1, devices_per_node=2, memory_bytes=8e9, cores_per_node=8),
    )
    return Cluster("mixed", "gpu+cpu", 4, 16, 8, groups=groups, links=Links(latency_s=0.0))


def test_each_class_of_devices_gets_what_suits_it() -> None:
    # the reward stage runs on CPU nodes as fast as on GPUs, which the model needs for itself
    stages = {"model": stage(0, 4, 60e9), "reward": stage(0, 2, 1e9, kind_factors={"gpu": 1.0, "cpu": 1.0})}
    work = graph(("model", "reward"), (("model", "reward"),), blocks=8)
    pricer = Pricer(work, profile(stages), mixed())
    best = find_plans(pricer)[0]
    placed = {leaf.stage: leaf.devices for leaf in leaves(best.tree)}
    assert placed["model"] == (0, 1)
    assert set(placed["reward"]) & {2, 3}
    memory = pricer.memory(best.tree)
    assert all(memory[device] <= mixed().place_of(device).group.memory_bytes for device in memory)


def test_a_cluster_file_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nodes\[0\] has unknown keys \['gpus'\]"):
        described_cluster({"nodes": [{"kind": "gpu", "gpus": 8}]}, "c.yaml")
    with pytest.raises(ConfigError, match="at least one group of nodes"):
        described_cluster({"name": "none"}, "c.yaml")


# ------------------------------------------------------------------------------------------------ the report, and files
def test_the_report_ranks_and_says_why_the_others_lost() -> None:
    work, measured = embodied((0, 1), (0, 1), (0, 1))
    ranked, _ = rank(Pricer(work, measured, cluster(2)))
    assert [entry.iteration_s for entry in ranked] == sorted(entry.iteration_s for entry in ranked)
    assert ranked[0].why_not == ""
    loser = next(entry for entry in ranked if entry.shape == "(rollout disaggregated > actor)")
    assert loser.why_not.startswith("+4 s (11%)")
    assert loser.devices == {"env": 1, "policy": 1, "actor": 2}
    assert ranked[0].idle_share == pytest.approx(0.0)
    assert 0.0 < loser.idle_share < 0.5


def test_a_written_plan_is_read_back_as_it_was() -> None:
    work = graph("abc", (("a", "b"), ("b", "c")), blocks=8)
    parked = {"resident_bytes": 60e9, "offload_s": 0.1, "onload_s": 0.1}
    pricer = Pricer(work, profile({name: stage(0.5, 1) | parked for name in "abc"}), cluster(3, 80e9))
    for plan in find_plans(pricer):
        tree = plan.tree
        written = json.loads(json.dumps(Plan("p", 3, tree).to_dict()))
        assert resolve("again", [written], 3, work).tree == tree


def test_a_plan_file_with_a_granularity_that_does_not_divide_is_refused() -> None:
    work = graph("ab", (("a", "b"),), blocks=8)
    parts = [{"leaf": {"stage": name, "devices": [k]}} for k, name in enumerate("ab")]
    with pytest.raises(PlanError, match="granularity 3, but chunks divide the 8 blocks"):
        resolve("p", [{"tree": {"spatial": {"granularity": 3, "parts": parts}}}], 2, work)
    with pytest.raises(PlanError, match="has `parts` and `resident`"):
        resolve("p", [{"tree": {"temporal": {"resident": True, "granularity": 2, "parts": parts}}}], 2, work)


def test_shares_are_single_devices_up_to_sixteen_and_whole_nodes_on_many() -> None:
    assert make_allocations([6], [6]).counts.ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert make_allocations([32], [8]).counts.ravel().tolist() == list(range(2, 33, 2))
    assert make_allocations([1024], [8]).counts.ravel().tolist() == list(range(64, 1025, 64))
    shares = make_allocations([4, 2], [4, 2])
    first, second = shares.counts[shares.first], shares.counts[shares.second]
    assert (first + second == shares.counts[shares.total]).all()


def test_four_thousand_devices_are_planned() -> None:
    stages = {
        name: stage(1, 0.5, 2e10, offload_s=1.0, onload_s=1.0)
        for name in ("generation", "reward", "logprob", "critic", "actor")
    }
    ends = [
        ("generation", "reward"),
        ("generation", "logprob"),
        ("reward", "critic"),
        ("logprob", "critic"),
        ("critic", "actor"),
    ]
    specs = {name: StageSpec(name, f"fakes.{name}", None) for name in stages}
    work = Workflow("ppo", 8192, specs, tuple(Edge(a, b, granularities=()) for a, b in ends))
    data = parse_profile({"format": FORMAT, "name": "big", "device_kind": "gpu", "stages": stages})
    pricer = Pricer(work, data, cluster(4096, 80e9, node=8))
    best = find_plans(pricer)[0]
    assert best.iteration_s < find_plans(pricer, Mode.spatial)[0].iteration_s + 1e-9


def test_a_plan_of_turns_on_one_device_needs_no_more_than_its_parts() -> None:
    pricer = Pricer(graph("ab", (("a", "b"),)), profile({name: stage(0, 1) for name in "ab"}), cluster(1))
    tree = Temporal((Leaf("a", (0,)), Leaf("b", (0,))))
    assert seconds(pricer, tree) == pytest.approx(16.0)


def waiting_case(waits: bool) -> Pricer:
    """Rewards that take long and no core, between stages that take the cores; two cores and two that wait."""
    machine = with_waiting(cluster(devices=2), 2)
    work = graph(("sample", "judge", "learn"), (("sample", "judge"), ("judge", "learn")), blocks=8)
    factors = {"kind_factors": {WAITING: 1.0}} if waits else {}
    stages = {"sample": stage(0, 0.25), "judge": stage(0, 0.25, **factors), "learn": stage(0, 0.25)}
    return Pricer(work, profile(stages), machine)


def test_what_waits_goes_where_no_core_is_and_the_others_go_on() -> None:
    best = find_plans(waiting_case(waits=True))[0]
    leaves = Plan("", 4, best.tree).leaves()
    assert leaves["judge"].devices == (2, 3)
    assert max(*leaves["sample"].devices, *leaves["learn"].devices) < 2
    turns = find_plans(waiting_case(waits=False))[0]
    assert Plan("", 4, turns.tree).devices() == (0, 1)
    assert best.iteration_s < 0.85 * turns.iteration_s


def test_a_preset_takes_the_devices_that_compute() -> None:
    pricer = waiting_case(waits=True)
    parts = [{"leaf": {"stage": name, "devices": "all"}} for name in ("sample", "judge", "learn")]
    assert resolve_on(pricer.cluster, "turns", [{"tree": {"temporal": parts}}], pricer.workflow).devices() == (0, 1)
    parts[1] = {"leaf": {"stage": "judge", "devices": [2, 3]}}
    found = resolve_on(pricer.cluster, "apart", [{"tree": {"temporal": parts}}], pricer.workflow)
    assert found.leaves()["judge"].devices == (2, 3)
