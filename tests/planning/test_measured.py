"""A profile names what makes its workflow's graph again: the one that runs, without its configs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from math_runs import tiny_math
from plan_cases import cluster, profile, stage
from runs import GRPO, tiny

from rlinf_embodied.embodied import workflow as embodied
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.probes import Measurements, Shown, profile_of
from rlinf_embodied.planning.profile import Workload, parse_profile, workflow_for
from rlinf_embodied.reasoning import workflow as reasoning
from rlinf_embodied.workflow.graph import Workflow

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
