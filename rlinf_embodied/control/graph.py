"""The graph of learning from transitions; imports nothing heavy, as planning uses it alone.

env <==> policy      loop "rollout": H chunk-steps; left out where all transitions are recorded
 |          ^
 +-> replay |        transitions, block by block; batches of all updates of an iteration
       |    |
     learner~~       new weights
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import WHOLE, Edge, Loop, StageSpec, WeightEdge, Workflow

ENV, POLICY, REPLAY, LEARNER = "env", "policy", "replay", "learner"
_PACKAGE = __name__.rpartition(".")[0]
_TARGETS = {
    ENV: "env_stage.TransitionEnvStage",
    POLICY: "acting_stage.ActingStage",
    REPLAY: "replay_stage.ReplayStage",
    LEARNER: "learner_stage.ControlLearnerStage",
}
_NO_CONFIGS: Mapping[str, object] = {}


def control_graph(num_blocks: int, loop: Loop | None, configs: Mapping[str, object] = _NO_CONFIGS) -> Workflow:
    """Returns the graph; without a loop nothing acts, without `configs`, by stage, it can be planned but not run."""
    names = (ENV, POLICY, REPLAY, LEARNER) if loop is not None else (REPLAY, LEARNER)
    stages = {name: StageSpec(name, f"{_PACKAGE}.{_TARGETS[name]}", configs.get(name)) for name in names}
    # an update is of all blocks
    stages[LEARNER] = replace(stages[LEARNER], collective=True, granularities=(WHOLE,))
    return Workflow(
        name="control",
        num_blocks=num_blocks,
        stages=stages,
        edges=(*((Edge(ENV, REPLAY),) if loop is not None else ()), Edge(REPLAY, LEARNER)),
        weight_edges=(WeightEdge(LEARNER, POLICY),) if loop is not None else (),
        loops={} if loop is None else {loop.name: loop},
        more_blocks="use more env.num_envs, a smaller env.block_size",
        of_workload=f"{__name__}.of_workload",
    )


def rollout(chunk_steps: int) -> Loop:
    """Returns the loop of so many chunk-steps, once."""
    return Loop("rollout", ENV, POLICY, chunk_steps)


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; all of it, whichever stages of a loop the profile has."""
    loop = rollout(work.chunk_steps) if {ENV, POLICY} & set(stages) else None
    graph = control_graph(work.num_items // work.items_per_block, loop)
    return replace(graph, items_per_block=work.items_per_block)
