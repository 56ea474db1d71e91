"""Devices that hold one of two stages: profile and plan let them switch, and the weights are those of a core."""

from __future__ import annotations

from dataclasses import replace

import pytest
from accelerated_runs import accelerators
from math_runs import PPO, tiny_math
from runs import cluster, digest, iterate

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import NoRoomError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import measure
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured
from rlinf_embodied.reasoning.fine_tuning import starting_policy
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.workflow.graph import Workflow

pytestmark = pytest.mark.accelerator

# weights and moments of actor and critic are 6.3 MB each, a step of one takes 10.6 MB besides: 16.9 MB for each
# in its turn, 23.3 MB for both
ROOM = 19_500_000
CONFIG = tiny_math(
    *("algorithm.reduction=exact", "warm_start.reduction=exact"),
    *("policy.hidden_size=128", "policy.intermediate_size=512", "policy.num_layers=2"),
    *("warm_start.steps=10", "algorithm.tokens_per_microbatch=64", *PPO, "algorithm.critic_warmup_iterations=0"),
)


def workflow_on(place: Cluster, session: Session) -> Workflow:
    folder = starting_policy(CONFIG, session, place, lambda *progress: None)
    session.clear()
    return training_workflow(CONFIG, str(folder))


def test_of_two_stages_that_do_not_fit_together_each_has_the_device_in_its_turn(sim) -> None:
    session, place = SerialSession(), replace(accelerators(1), memory_bytes=ROOM)
    workflow = workflow_on(place, session)
    sim.set_limit(sim.memory_allocated(0) + ROOM, 0)  # what earlier tests of this process left is not the workflow's
    profile = measure(workflow, session, place, "little", {}, lambda *progress: None, budget_s=0.1)
    pricer = Pricer(as_measured(workflow, profile), profile, place)
    together = collocated(workflow, 1)
    assert pricer.memory(together)[0] > ROOM
    best = rank(pricer).best.plan
    assert pricer.memory(best)[0] <= ROOM
    assert best.exclusive == (("actor", "critic"),)
    learns, makes = (float(profile.stages[stage].working_bytes.max()) for stage in ("actor", "prompts"))
    assert makes < 0.01 * learns
    with pytest.raises(NoRoomError, match=r"has no room for .*make them exclusive"):
        iterate(CONFIG, Executor(workflow, together, session, place), 1)
    session.clear()
    switching = Executor(workflow, best, session, place)
    metrics = iterate(CONFIG, switching, 2)
    of_a_core = SerialSession()
    plain = Executor(workflow_on(cluster(1), of_a_core), together, of_a_core, cluster(1))
    assert metrics == iterate(CONFIG, plain, 2)
    assert digest(switching) == digest(plain)


def test_a_stage_that_does_not_fit_alone_ends_the_profile_with_what_was_without_room(sim) -> None:
    session, place = SerialSession(), replace(accelerators(1), memory_bytes=ROOM)
    workflow = workflow_on(place, session)
    sim.set_limit(sim.memory_allocated(0) + ROOM // 3, 0)
    with pytest.raises(
        NoRoomError, match=r"worker 0 \(sim:0\) has no room for .*make blocks, microbatches or the model"
    ):
        measure(workflow, session, place, "little", {}, lambda *progress: None, budget_s=0.1)
