"""What a profile says about workflow and cluster.

Where only a profile is at hand, workflows are made for it: the same graphs as those that run, without their configs.
"""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.flow.graph import WHOLE, Edge, Loop, Repeat, StageSpec, Verdict, WeightEdge, Workflow
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


_REASONING = {
    "prompts": "prompt_stage.PromptStage",
    "generation": "generation_stage.GenerationStage",
    "reward": "reward_stage.RewardStage",
    "proximal": "logprob_stage.LogProbStage",
    "reference": "logprob_stage.LogProbStage",
    "logprob": "logprob_stage.LogProbStage",  # of profiles that were not measured here
    "critic": "critic_stage.CriticStage",
    "actor": "actor_stage.ActorStage",
}


def reasoning_workflow(work: Workload, stages: tuple[str, ...]) -> Workflow:
    """Returns prompts, generation, reward, log-probs and critic where they are profiled, then actor.

    Answers flow on in chunks as they are finished.  Gradients are accumulated over chunks, but where there is a critic,
    more than one optimizer step (which needs proximal log-probs) or a repeat.
    """
    known = {name: target for name, target in _REASONING.items() if name in stages}
    waits = "prompts" in stages and (work.max_rounds > 1 or bool({"critic", "proximal"} & set(stages)))
    specs = {name: _reasoning_spec(name, target, work, waits) for name, target in known.items()}
    ends = _measured_ends(stages) if "prompts" in stages else _published_ends(stages)
    streams = {name: not (waits and name in ("critic", "actor")) for name in specs}
    edges = tuple(Edge(a, b, granularities=() if streams[b] else (WHOLE,)) for a, b in ends)
    judge = lambda rounds: Verdict(True)  # noqa: E731 - nothing runs
    return Workflow(
        name="reasoning",
        num_blocks=work.num_items // work.items_per_block,
        stages=specs,
        edges=edges,
        weight_edges=tuple(WeightEdge("actor", name) for name in ("generation", "proximal") if name in stages),
        repeat=Repeat("refill", "actor", "reward", judge, work.max_rounds) if work.max_rounds > 1 else None,
        items_per_block=work.items_per_block,
    ).with_rounds(work.expected_rounds)


def _reasoning_spec(name: str, target: str, work: Workload, waits: bool) -> StageSpec:
    learns = name in ("critic", "actor")
    together = work.together if name == "generation" else 1
    return StageSpec(
        *(name, f"rlinf_embodied.reasoning.{target}", None),
        collective=learns,
        granularities=(WHOLE,) if learns and waits else (),
        at_once=together > 1,
        together=together,
    )


def _measured_ends(stages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the data edges of the workflow that runs (reasoning/workflow.py)."""
    sources = [name for name in ("generation", "reward", "proximal", "reference", "critic") if name in stages]
    ends = [("prompts", "generation"), ("generation", "reward")]
    ends += [("generation", name) for name in ("proximal", "reference", "critic") if name in stages]
    ends += [("reward", "critic")] if "critic" in stages else []
    return [*ends, *((name, "actor") for name in sources)]


def _published_ends(stages: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the data edges of systems whose costs were published: log-probs are a stage before the learners."""
    ends = [
        *(("generation", "reward"), ("generation", "logprob"), ("reward", "critic"), ("logprob", "critic")),
        *(("logprob", "actor"), ("critic", "actor")),
    ]
    if "critic" not in stages:
        ends.append(("reward", "actor"))
    return [(a, b) for a, b in ends if a in stages and b in stages]


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
