"""The embodied workflow's graph; imports nothing heavy, as planning uses it alone.

env <-> policy, then actor          two levels:  env -> high_policy (every k chunk-steps) -> policy -> env,
                                                 then high_actor, and actor where the low-level policy learns, too
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import CORES, WHOLE, Edge, Loop, StageSpec, Turn, WeightEdge, Workflow

ENV, POLICY, ACTOR = "env", "policy", "actor"
HIGH_POLICY, HIGH_ACTOR = "high_policy", "high_actor"
_PACKAGE = __name__.rpartition(".")[0]
_NO_CONFIGS: Mapping[str, object] = {}


def embodied_graph(
    num_blocks: int,
    loop: Loop,
    configs: Mapping[str, object] = _NO_CONFIGS,
    *,
    on_cores: bool = False,
    robots: bool = False,
    frozen: bool = False,
) -> Workflow:
    """Returns the graph; with two levels of policies where `loop` has a stage in between.

    Args:
        num_blocks: of env rows.
        loop: the rollout.
        configs: of the stages; without them the graph can be planned but not run.
        on_cores: whether simulators run on cores only, also where there are accelerators.
        robots: whether env steps take their time whatever computes them, so that the env mostly waits.
        frozen: whether the low-level policy of two stays as it is.
    """
    kinds = CORES if on_cores else ()
    two_levels = bool(loop.between)
    learners = {ACTOR: POLICY} if not two_levels else {HIGH_ACTOR: HIGH_POLICY}
    learners |= {ACTOR: POLICY} if two_levels and not frozen else {}
    policies = (HIGH_POLICY, POLICY) if two_levels else (POLICY,)
    return Workflow(
        name="embodied",
        num_blocks=num_blocks,
        stages={
            ENV: StageSpec(ENV, f"{_PACKAGE}.env_stage.EnvStage", configs.get(ENV), kinds=kinds, waits=robots),
            **{
                policy: StageSpec(policy, f"{_PACKAGE}.rollout_stage.RolloutStage", configs.get(policy))
                for policy in policies
            },
            **{
                actor: StageSpec(
                    *(actor, f"{_PACKAGE}.actor_stage.ActorStage", configs.get(actor)),
                    collective=True,
                    granularities=(WHOLE,),  # statistics and minibatches are of all blocks
                )
                for actor in learners
            },
        },
        edges=tuple(edge for actor, policy in learners.items() for edge in (Edge(policy, actor), Edge(ENV, actor))),
        weight_edges=tuple(WeightEdge(actor, policy) for actor, policy in learners.items()),
        loops={loop.name: loop},
        more_blocks="use more env.num_envs, a smaller env.block_size",
        of_workload=f"{__name__}.of_workload",
    )


def rollout(chunk_steps: int, every: int = 0) -> Loop:
    """Returns the loop of so many chunk-steps, once; with a high-level policy that acts in every `every`-th of them."""
    return Loop("rollout", ENV, POLICY, chunk_steps, between=(Turn(HIGH_POLICY, every),) if every else ())


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; all of it, whichever stages the profile has."""
    loop = rollout(work.chunk_steps, work.every if HIGH_POLICY in stages else 0)
    loop = replace(loop, max_rounds=work.max_rounds, expected_rounds=work.expected_rounds)
    graph = embodied_graph(work.num_items // work.items_per_block, loop, frozen=ACTOR not in stages)
    return replace(graph, items_per_block=work.items_per_block)
