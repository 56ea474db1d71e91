"""The embodied workflow's graph: env <-> policy, then actor; imports nothing heavy, as planning uses it alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlinf_embodied.flow.graph import CORES, WHOLE, Edge, Loop, StageSpec, WeightEdge, Workflow
from rlinf_embodied.flow.profile import Workload

ENV, POLICY, ACTOR = "env", "policy", "actor"
_PACKAGE = __name__.rpartition(".")[0]
_NO_CONFIGS: Mapping[str, object] = {}


def embodied_graph(
    num_blocks: int,
    loop: Loop,
    configs: Mapping[str, object] = _NO_CONFIGS,
    *,
    on_cores: bool = False,
    robots: bool = False,
) -> Workflow:
    """Returns the graph.

    Args:
        num_blocks: of env rows.
        loop: the rollout.
        configs: of the stages; without them the graph can be planned but not run.
        on_cores: whether simulators run on cores only, also where there are accelerators.
        robots: whether env steps take their time whatever computes them, so that the env mostly waits.
    """
    kinds = CORES if on_cores else ()
    return Workflow(
        name="embodied",
        num_blocks=num_blocks,
        stages={
            ENV: StageSpec(ENV, f"{_PACKAGE}.env_stage.EnvStage", configs.get(ENV), kinds=kinds, waits=robots),
            POLICY: StageSpec(POLICY, f"{_PACKAGE}.rollout_stage.RolloutStage", configs.get(POLICY)),
            ACTOR: StageSpec(
                *(ACTOR, f"{_PACKAGE}.actor_stage.ActorStage", configs.get(ACTOR)),
                collective=True,
                granularities=(WHOLE,),  # statistics and minibatches are of all blocks
            ),
        },
        edges=(Edge(POLICY, ACTOR), Edge(ENV, ACTOR)),
        weight_edges=(WeightEdge(ACTOR, POLICY),),
        loops={loop.name: loop},
        more_blocks="use more env.num_envs, a smaller env.block_size",
        of_workload=f"{__name__}.of_workload",
    )


def rollout(chunk_steps: int) -> Loop:
    """Returns the loop of so many chunk-steps, once."""
    return Loop("rollout", ENV, POLICY, chunk_steps)


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; all of it, whichever stages the profile has."""
    loop = replace(rollout(work.chunk_steps), max_rounds=work.max_rounds, expected_rounds=work.expected_rounds)
    return replace(embodied_graph(work.num_items // work.items_per_block, loop), items_per_block=work.items_per_block)
