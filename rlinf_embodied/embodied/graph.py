"""The embodied workflow's graph (pictured in workflow.py); imports nothing heavy, as planning uses it alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import CORES, Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

ENV, POLICY, REPLAY, ACTOR, HIGH_ACTOR = "env", "policy", "replay", "actor", "high_actor"
_PACKAGE = __name__.rpartition(".")[0]
ROLLOUT = Loop("rollout", ENV, POLICY, 1)  # its chunk-steps are those of a configuration or profile
RESAMPLE = Repeat("resample", ACTOR, ENV, lambda rounds: RepeatDecision(True), 1)  # until the env's reports suffice


def embodied_graph(
    num_blocks: int,
    loop: Loop | None,
    configs: Mapping[str, object] | None = None,
    *,
    on_cores: bool = False,
    robots: bool = False,
    learners: Sequence[str] = (ACTOR,),
    replay: bool = False,
    demonstrates: bool = False,
) -> Workflow:
    """Returns the graph.

    Args:
        num_blocks: of env rows.
        loop: the rollout; None: nothing acts, and what is learned from is recorded.
        configs: of the stages; without them the graph can be planned but not run.
        on_cores: whether simulators run on cores only, also where there are accelerators.
        robots: whether env steps take their time whatever computes them, so that the env mostly waits.
        learners: one for each level of policies that is trained; with HIGH_ACTOR, `policy` is one of two levels.
        replay: whether transitions are kept, and the learner gets batches of them.
        demonstrates: whether the learner's workers make demonstrations.
    """
    acting = "hierarchy.TwoLevelStage" if HIGH_ACTOR in learners else "rollout_stage.RolloutStage"
    spec = lambda name, target, **more: StageSpec(name, f"{_PACKAGE}.{target}", (configs or {}).get(name), **more)  # noqa: E731
    stages: list[StageSpec] = []
    if loop is not None:
        kinds = CORES if on_cores else ()
        stages = [spec(ENV, "env_stage.EnvStage", kinds=kinds, waits=robots), spec(POLICY, acting)]
    edges = [Edge(source, actor) for actor in learners for source in (POLICY, ENV)]
    if replay:
        stages.append(spec(REPLAY, "replay_stage.ReplayStage"))
        edges = [*([] if loop is None else [Edge(ENV, REPLAY)]), Edge(REPLAY, ACTOR)]
    # statistics and minibatches are of all blocks
    learner = "fine_tuning.CloningLearner" if demonstrates else "learner.PolicyLearner"
    stages += [spec(actor, learner, collective=True, whole=True) for actor in learners]
    return Workflow(
        name="embodied",
        num_blocks=num_blocks,
        stages={stage.name: stage for stage in stages},
        edges=tuple(edges),
        weight_edges=() if loop is None else tuple(WeightEdge(actor, POLICY) for actor in learners),
        loops={} if loop is None else {loop.name: loop},
        more_blocks="use more env.num_envs, a smaller env.block_size",
        of_workload=f"{__name__}.of_workload",
    )


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; all of it, whichever stages the profile has."""
    acts = {ENV, POLICY} & set(stages) or REPLAY not in stages
    loop = replace(ROLLOUT, chunk_steps=work.chunk_steps) if acts else None
    learners = [actor for actor in (HIGH_ACTOR, ACTOR) if actor in stages] or [ACTOR]
    graph = embodied_graph(work.num_items // work.items_per_block, loop, learners=learners, replay=REPLAY in stages)
    graph = replace(graph, items_per_block=work.items_per_block)
    if work.max_rounds == 1:
        return graph
    return replace(graph, repeat=replace(RESAMPLE, max_rounds=work.max_rounds)).with_rounds(work.expected_rounds)
