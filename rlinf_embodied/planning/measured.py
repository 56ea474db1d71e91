"""What a profile says about workflow and cluster.

Where only a profile is at hand, its workload names a function of the workflow's own package, which makes the graph that
was measured: the same as the one that runs, without its configs.
"""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.profile import Profile
from rlinf_embodied.plug_ins import load_plug_in
from rlinf_embodied.workflow.graph import Workflow


def workflow_for(profile: Profile, name: str | None = None) -> Workflow:
    """Returns the workflow that a profile was measured for: `workload.workflow` called with workload and stage names.

    Raises:
        ConfigError: the profile names no workload, or nothing that can be called so, or another workflow than `name`.
    """
    work, where = profile.workload, f"profile {profile.name}: workload"
    if work is None:
        raise ConfigError(f"{where} is missing, but a plan is made for one: use a profile that was measured for one")
    workflow = load_plug_in(work.workflow, f"{where}.workflow", "work", "stages")(work, tuple(profile.stages))
    assert isinstance(workflow, Workflow), f"{work.workflow} makes a {type(workflow).__name__}"
    if name not in (None, workflow.name):
        raise ConfigError(
            f"{where}.workflow is {work.workflow!r}, of {workflow.name}, but workflow={name} is asked for: use a "
            "profile of that workflow"
        )
    return workflow


def as_measured(workflow: Workflow, profile: Profile) -> Workflow:
    """Returns the workflow with the rounds that its repeats took when it was measured."""
    if profile.workload is None:
        return workflow
    return workflow.with_rounds(profile.workload.expected_rounds)


def linked(cluster: Cluster, profile: Profile) -> Cluster:
    """Returns the cluster with the wire that was measured, where one was."""
    return cluster if profile.links is None else replace(cluster, links=profile.links)
