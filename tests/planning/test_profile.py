"""Workflows and profiles: what is read between the points, and what a graph or a file may not say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from math_runs import tiny_math
from plan_cases import cluster, graph, profile, stage
from runs import GRPO, tiny

from rlinf_embodied.embodied import workflow as embodied
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.planning.probes import Measurements, Shown, profile_of
from rlinf_embodied.planning.profile import FORMAT, Workload, interpolate, load_profile, parse_profile, workflow_for
from rlinf_embodied.reasoning import workflow as reasoning
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, Workflow

PROFILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "profiles").glob("*.json"))


def data(**changes) -> dict:
    entry = {
        "items_per_device": [1, 2, 4],
        "devices": [1, 4],
        "s_per_call": [[1.0, 2.0], [2.0, 3.0], [6.0, 9.0]],
        **changes,
    }
    return {"format": FORMAT, "name": "test", "device_kind": "gpu", "stages": {"a": entry}}


def test_between_points_lines_beyond_them_the_last_slope() -> None:
    xs, ys = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 6.0])
    assert [interpolate(x, xs, ys) for x in (0.5, 1.0, 1.5, 3.0, 4.0, 6.0)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]
    # what fell at the end does not keep falling
    assert [interpolate(x, np.array([1.0, 2.0]), np.array([5.0, 4.0])) for x in (2.0, 9.0)] == [4.0, 4.0]


def test_both_axes_are_interpolated() -> None:
    measured = parse_profile(data()).stages["a"]
    assert measured.call_s(3, 1) == pytest.approx(4.0)  # halfway between 2 and 6
    assert measured.call_s(2, 2) == pytest.approx(2 + 1 / 3)  # a third of the way from 1 to 4 devices
    assert [measured.call_s(1, 4), measured.call_s(6, 1)] == [2.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s_per_call": [[1.0, -2.0], [2.0, 3.0], [6.0, 9.0]]}, r"stages\.a\.s_per_call is -2\.0, .* not negative"),
        ({"s_per_call": [[1.0], [2.0], [6.0]]}, r"a table of 3 rows \(items_per_device\) and 2 columns"),
        ({"ms_per_call": [[1.0]]}, r"a\.ms_per_call is unknown: did you mean s_per_call\? times are in seconds"),
        ({"resident_gb": 3.0}, r"a\.resident_gb is unknown: .*sizes in bytes"),
        ({"offload_s": float("nan")}, r"a\.offload_s is nan"),
        ({"items_per_device": [2, 1, 4]}, r"an ascending list of positive numbers"),
        ({"s_per_chunk_step": 1.0}, r"needs one of s_per_call, s_per_chunk_step"),
        ({"finish_quantiles": [[0.5, 0.2], [1.0, 0.9]]}, r"end at \[1, 1\]"),
        ({"items_per_device": [1], "s_per_call": [[1.0, 2.0]]}, "a slope needs two points"),
    ],
)
def test_a_broken_stage_names_the_key_and_the_rule(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profile(data(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.full((3, 2), np.nan)}, r"stages\.a\.s_per_call is .*nan.*, .* not negative"),
        ({"offload_s": float("inf")}, r"stages\.a\.offload_s is inf"),
        ({"kind_factors": {"h200": -0.5}}, r"kind_factors\.h200 is -0\.5"),
        ({"stays": 1}, "true or false"),
    ],
)
def test_a_stage_that_code_makes_is_checked_as_one_of_a_file(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(parse_profile(data()).stages["a"], **changes)


def test_a_missing_stage_and_one_measured_otherwise_are_named() -> None:
    measured = profile({"env": stage(1, 1, loop=True), "actor": stage(1, 1)})
    with pytest.raises(ConfigError, match=r"has the stage 'policy', but the profile holds only \['actor', 'env'\]"):
        measured.require(["env", "policy"], ["env", "policy"])
    with pytest.raises(ConfigError, match="'actor' has s_per_call, but the workflow uses it inside a loop"):
        measured.require(["actor"], ["actor"])


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_published_profile_loads_names_its_sources_and_fits_its_workflow(path: Path) -> None:
    measured = load_profile(path)
    written = json.dumps(measured.to_dict())
    assert json.dumps(parse_profile(json.loads(written)).to_dict()) == written
    work = workflow_for(measured)
    inside = [end for loop in work.loops.values() for end in (loop.opener, loop.answerer)]
    measured.require(work.stages, inside)
    assert {"workload", "frozen"} <= set(measured.sources)
    assert len(measured.sources) >= 5


RUNS = {
    "ppo": lambda: embodied.training_workflow(tiny(), "x"),
    "grpo": lambda: embodied.training_workflow(tiny(*GRPO), "x"),
    "language grpo": lambda: reasoning.training_workflow(tiny_math(), "x"),
    "language ppo": lambda: reasoning.training_workflow(tiny_math("algorithm=ppo"), "x"),
    "steps and divergence": lambda: reasoning.training_workflow(
        tiny_math("algorithm.num_minibatches=2", "algorithm.kl_coef=0.1"), "x"
    ),
    "dynamic sampling": lambda: reasoning.training_workflow(tiny_math("algorithm=dapo"), "x"),
}


def what_is_planned(work: Workflow) -> dict[str, object]:
    """All that the planner reads."""
    loops = {n: (o.opener, o.answerer, o.chunk_steps, o.shards) for n, o in work.loops.items()}
    repeat = work.repeat and (work.repeat.before, work.repeat.decided_by, work.repeat.max_rounds)
    return {
        "stages": {name: replace(spec, config=None) for name, spec in work.stages.items()},
        "edges": (work.name, work.num_blocks, work.items_per_block, work.edges, work.weight_edges),
        "rounds": (loops, repeat),
    }


@pytest.mark.parametrize("run", RUNS)
def test_the_graph_that_a_profile_makes_is_the_one_that_was_measured(run: str) -> None:
    work = RUNS[run]()
    measured = Measurements(work)
    measured.stages = {name: Shown(seconds={(1, 1): [0.5], (2, 1): [0.5]}) for name in work.stages}
    again = workflow_for(parse_profile(profile_of("x", cluster(2), measured, {}).to_dict()))
    assert what_is_planned(again) == what_is_planned(work)
    assert not any(spec.config for spec in again.stages.values())


def test_a_profile_may_be_of_a_workflow_of_a_user() -> None:
    measured = profile({name: stage(1.0, 1.0) for name in ("a", "b")})
    found = workflow_for(replace(measured, workload=Workload("plan_cases.own_graph", 6)))
    assert (tuple(found.stages), found.num_blocks) == (("a", "b"), 6)


def test_a_profile_that_names_no_workflow_is_refused() -> None:
    measured = profile({"a": stage(1.0, 1.0)})
    with pytest.raises(ConfigError, match=r"workload.workflow is 'nowhere.graph', but nowhere cannot be imported"):
        workflow_for(replace(measured, workload=Workload("nowhere.graph", 6)))
    with pytest.raises(ConfigError, match="workload is missing"):
        workflow_for(measured)


def test_the_order_follows_the_edges() -> None:
    work = graph(("c", "b", "a"), (("a", "c"), ("c", "b")))
    assert work.order() == ("a", "c", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": (("a", "x"),)}, r"edge a -> x names the stage 'x', but there are only \['a', 'b'\]"),
        ({"edges": (("a", "b"), ("b", "a"))}, r"the edges among \['a', 'b'\] form a cycle: declare it as a loop"),
        ({"loops": {"l": Loop("l", "a", "b", 0)}}, "chunk_steps=0, but a loop needs at least one"),
        ({"loops": {"l": Loop("l", "a", "a", 1)}}, "consists of two stages"),
        (
            {"loops": {"k": Loop("k", "a", "b", 1), "l": Loop("l", "b", "c", 1)}, "stages": "abc"},
            r"loop k shares \['b'\] with l: give each loop its own stages",
        ),
        ({"blocks": 0}, "a workflow needs at least one"),
    ],
)
def test_a_broken_workflow_is_refused_with_the_reason(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graph(tuple(changes.pop("stages", "ab")), **{"edges": (), **changes})


def stages(**changes: dict) -> dict[str, StageSpec]:
    return {name: StageSpec(name, "fakes.x", None, **changes.get(name, {})) for name in "abc"}


ENOUGH = Repeat("more", "c", "b", lambda rounds: RepeatDecision(True), max_rounds=3)
CHAIN = (Edge("a", "b"), Edge("b", "c"))


@pytest.mark.parametrize(
    ("repeat", "changes", "edges", "message"),
    [
        (replace(ENOUGH, before="x"), {}, CHAIN, "repeat more names the stage 'x'"),
        (
            replace(ENOUGH, decided_by="c"),
            {},
            CHAIN,
            r"is decided by c, whose data does not reach c: set decided_by to one of \['a', 'b'\]",
        ),
        (ENOUGH, {}, CHAIN[1:], r"\['a'\] are neither upstream nor downstream of c"),
        (ENOUGH, {"c": {}}, CHAIN, "c waits for all rounds: give it whole=True"),
    ],
)
def test_a_repeat_is_refused_with_the_reason(repeat: Repeat, changes: dict, edges: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Workflow("w", 4, stages(**{"c": {"whole": True}, **changes}), edges, repeat=repeat)


def test_what_comes_before_the_stage_is_counted_by_rounds() -> None:
    work = Workflow("w", 4, stages(c={"whole": True}), CHAIN, repeat=ENOUGH).with_rounds(1.5)
    assert work.expected_rounds() == {"a": 1.5, "b": 1.5}
    assert work.rounds({"b": [[1], [2]]}) == {"a": 2, "b": 2}
