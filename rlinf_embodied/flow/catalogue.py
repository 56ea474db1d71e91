"""What a profile says about workflow and cluster.

Where only a profile is at hand, workflows are made for it: the same graphs as those that run, without their configs.
"""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.flow.graph import Edge, Loop, StageSpec, WeightEdge, Workflow
from rlinf_embodied.flow.profile import Profile, Workload


def embodied_workflow(work: Workload) -> Workflow:
    """Returns env <-> policy, then actor."""
    package = "rlinf_embodied.embodied"
    return Workflow(
        name="embodied",
        num_blocks=work.num_items // work.items_per_block,
        stages={
            "env": StageSpec("env", f"{package}.env_stage.EnvStage", None),
            "policy": StageSpec("policy", f"{package}.rollout_stage.RolloutStage", None),
            "actor": StageSpec("actor", f"{package}.actor_stage.ActorStage", None, collective=True),
        },
        edges=(Edge("policy", "actor"), Edge("env", "actor")),
        weight_edges=(WeightEdge("actor", "policy"),),
        loops={
            "rollout": Loop(
                *("rollout", "env", "policy", work.chunk_steps),
                max_rounds=work.max_rounds,
                expected_rounds=work.expected_rounds,
            )
        },
        items_per_block=work.items_per_block,
    )


def reasoning_workflow(work: Workload, stages: tuple[str, ...]) -> Workflow:
    """Returns generation, then log-probs (with reward and critic where they are profiled), then actor.

    Answers flow on in chunks as they are finished; gradients are accumulated over chunks.
    """
    package = "rlinf_embodied.reasoning"
    known = {
        "generation": StageSpec("generation", f"{package}.generation_stage.GenerationStage", None),
        "reward": StageSpec("reward", f"{package}.reward_stage.RewardStage", None),
        "logprob": StageSpec("logprob", f"{package}.logprob_stage.LogProbStage", None),
        "critic": StageSpec("critic", f"{package}.critic_stage.CriticStage", None, collective=True),
        "actor": StageSpec("actor", f"{package}.actor_stage.ActorStage", None, collective=True),
    }
    ends = [
        *(("generation", "reward"), ("generation", "logprob"), ("reward", "critic"), ("logprob", "critic")),
        *(("logprob", "actor"), ("critic", "actor")),
    ]
    if "critic" not in stages:
        ends.append(("reward", "actor"))
    edges = tuple(Edge(a, b, granularities=()) for a, b in ends if a in stages and b in stages)
    return Workflow(
        name="reasoning",
        num_blocks=work.num_items // work.items_per_block,
        stages={name: spec for name, spec in known.items() if name in stages},
        edges=edges,
        weight_edges=(WeightEdge("actor", "generation"),),
        items_per_block=work.items_per_block,
    )


def workflow_for(profile: Profile, name: str | None = None) -> Workflow:
    """Returns the workflow that a profile was measured for.

    Raises:
        ConfigError: the profile names no workload, or another workflow than `name`.
    """
    work = profile.workload
    if work is None or work.workflow not in ("embodied", "reasoning") or (name and name != work.workflow):
        has = None if work is None else work.workflow
        raise ConfigError(
            f"profile {profile.name}: workload.workflow is {has!r}, but {name or 'embodied or reasoning'} is asked "
            "for: use a profile of that workflow"
        )
    return embodied_workflow(work) if work.workflow == "embodied" else reasoning_workflow(work, tuple(profile.stages))


def as_measured(workflow: Workflow, profile: Profile) -> Workflow:
    """Returns the workflow with the rounds that its repeats took when it was measured."""
    if profile.workload is None:
        return workflow
    return workflow.with_rounds(profile.workload.expected_rounds)


def linked(cluster: Cluster, profile: Profile) -> Cluster:
    """Returns the cluster with the wire that was measured, where one was."""
    return cluster if profile.links is None else replace(cluster, links=profile.links)
