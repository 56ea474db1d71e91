"""Runs plans on emulated clusters: the real executor and workers, with stages that sleep.

The measurement shares only the times of single calls with the prediction (the profile's), and nothing else with the
planner: which calls overlap, wait and follow each other results from running them.  emulated_stage.py has the clock.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlinf_embodied.config import PlanConfig
from rlinf_embodied.errors import WorkerError
from rlinf_embodied.execution.ahead import Follow
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import Effort
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.probes import Iteration, Measurements, Probe, probes, profile_of, sample, switching
from rlinf_embodied.planning.profile import Profile
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.tools.emulated_stage import NO_WEIGHTS, EmulatedStageConfig, Finish, Start
from rlinf_embodied.workflow.graph import RepeatDecision, StageSpec, Workflow

_TARGET = "rlinf_embodied.tools.emulated_stage.EmulatedStage"
_WARM_UP = 0.1  # time scale of the first iterations relative to the others: they are not measured
LEAST_S = 4.0  # minimum wall seconds of an iteration, so that the last hop's overhead is below 1 %
_NUMBERS = itertools.count(1)  # of iterations, so that workers can tell them apart
S_PER_CALL = 0.003  # wall seconds that two cores need for a call from submission to receipt, with room to spare


@dataclass(frozen=True, slots=True)
class Emulated:
    """A plan's iterations on emulated devices; seconds are emulated ones unless stated otherwise."""

    plan: Plan
    predicted_s: float
    measured_s: tuple[float, ...]  # of each iteration
    due_s: tuple[float, ...]  # of each iteration by the deadlines of its calls, without delays of this machine
    peak_bytes: float  # of any device
    wall_s: float  # of all iterations
    scale: float


@dataclass(frozen=True, slots=True)
class Iterated:
    """One iteration."""

    begin: Start
    end_s: float  # emulated seconds by the deadlines of its calls, over all iterations
    due: tuple[Span, ...]  # its calls by their deadlines, in emulated seconds
    spans: tuple[Span, ...]  # its calls on the wall clock
    peak_bytes: float


def time_scale(pricer: Pricer, plan: Plan) -> float:
    """Returns wall seconds per emulated second at which one machine keeps up with a plan's calls."""
    simulation = simulate(plan, pricer)
    return max(LEAST_S, simulation.calls * S_PER_CALL) / simulation.iteration_s


def iterations(pricer: Pricer, session: Session, plan: Plan, scales: Sequence[float]) -> list[Iterated]:
    """Runs iterations of a plan, one for each scale in wall seconds per emulated second.

    Raises:
        WorkerError: the plan needs more memory than a device has.
    """
    session.clear()  # otherwise stages of the previous plan would be switched out for those of this one
    executor = Executor(emulated_workflow(pricer, plan.name), plan, session, pricer.cluster)
    done, clock_s = list[Iterated](), 0.0
    for scale in scales:
        begin = Start(next(_NUMBERS), time.time(), scale, clock_s)
        now = Follow(lambda context, _, begin=begin: replace(context, iteration=context.iteration + 1, message=begin))
        result = executor.run(StepContext(begin.iteration, message=begin), now)
        reports = [report for rounds in result.reports.values() for reports in rounds for report in reports]
        finishes = of_type(reports, Finish)
        clock_s = max(clock_s, *(finish.end_s for finish in finishes))
        peak_bytes = max(finish.peak_bytes for finish in finishes)
        last = {
            finish.spans[0].worker: finish.spans for finish in sorted(finishes, key=lambda f: f.end_s) if finish.spans
        }
        due = tuple(itertools.chain.from_iterable(last.values()))
        done.append(Iterated(begin, clock_s, due, tuple(result.spans), peak_bytes))
    return done


def emulate(pricer: Pricer, session: Session, plan: Plan, num_iterations: int, scale: float | None = None) -> Emulated:
    """Runs a plan for 1 + plan.staleness warm-up iterations, then measures `num_iterations`.

    The session's workers keep the plan's stages.  `scale`: wall seconds per emulated second; None: the smallest
    at which this machine keeps up.
    """
    assert pricer.cluster.emulated, f"cluster {pricer.cluster.name} is not emulated"
    scale, before = scale or time_scale(pricer, plan), 1 + plan.staleness
    counted = iterations(pricer, session, plan, [scale * _WARM_UP] * before + [scale] * num_iterations)[before:]
    return Emulated(
        plan=plan,
        predicted_s=simulate(plan, pricer).iteration_s,
        measured_s=tuple((max(span.end_s for span in done.spans) - done.begin.wall_s) / scale for done in counted),
        due_s=tuple(done.end_s - done.begin.begin_s for done in counted),
        peak_bytes=max(done.peak_bytes for done in counted),
        wall_s=time.time() - counted[0].begin.wall_s,
        scale=scale,
    )


def emulated_workflow(pricer: Pricer, run: str) -> Workflow:
    """Returns the workflow with every stage replaced by one that sleeps; `run` names the run."""
    workflow, run = pricer.workflow, f"{run} {uuid.uuid4().hex[:8]}"  # unique, since runs may share workers
    stages = {
        name: replace(
            spec,
            target=_TARGET,
            lent=_TARGET,
            config=_config(pricer, spec, run),
            at_once=bool(pricer.profile.stages[name].finish_quantiles),
        )
        for name, spec in workflow.stages.items()
    }
    repeat = workflow.repeat and replace(workflow.repeat, decide=partial(decided, workflow.repeat.expected_rounds))
    return replace(workflow, stages=stages, repeat=repeat)


def decided(expected: float, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
    """Ends a repeat such that it averages its expected number of rounds over the iterations."""
    start = of_type(rounds[0], Finish)[0].start
    num_rounds = int((start.iteration + 1) * expected) - int(start.iteration * expected)
    return RepeatDecision(len(rounds) >= num_rounds, message=start)


def _config(pricer: Pricer, spec: StageSpec, run: str) -> EmulatedStageConfig:
    work, name = pricer.workflow, spec.name
    ends = [(edge.source, edge.target) for edge in work.edges]
    ends += [hop for loop in work.loops.values() for hop in loop.hops()]
    weights = {(edge.source, edge.target): NO_WEIGHTS for edge in work.weight_edges} | dict(pricer.profile.weights)
    return EmulatedStageConfig(
        run=run,
        profile=pricer.profile.stages[name],
        items_per_block=work.items_per_block,
        cluster=pricer.cluster,
        slowdown=tuple(pricer.slowdown_on(name, device) for device in range(pricer.cluster.num_devices)),
        answers=any(loop.answerer == name for loop in work.loops.values()),
        bytes_per_block={
            a: pricer.edge_bytes(a, b) / pricer.rounds.get(a, 1.0) * work.items_per_block for a, b in ends if b == name
        },
        exports=next((known for (a, _), known in weights.items() if a == name), NO_WEIGHTS),
        installs=next((known for (_, b), known in weights.items() if b == name), NO_WEIGHTS),
    )


# ------------------------------------------------------------------------------------------------------------ a launch
def emulated_launch(pricer: Pricer, session: Session) -> tuple[Profile, dict[str, float]]:
    """Runs the probes of a launch with plan=auto on emulated devices.

    Memory, switches and bytes are not emulated: they are copied from the profile that sets the devices' sleeps.

    Returns:
        the profile that the probes measure, and the emulated seconds of each probe.
    """
    truth, planned, probe_s = pricer.profile, probes(pricer.workflow, pricer.cluster), dict[str, float]()
    effort = Effort(pricer.workflow, planned, PlanConfig().profile_budget_s)
    measured = Measurements(pricer.workflow, edge_bytes_per_item=dict(truth.edge_bytes_per_item))
    measured.weights |= truth.weights

    def measure(probe: Probe) -> None:
        done: list[Iteration] = []
        runs, _ = effort.measure(probe, lambda run, *_: done.append(_probed(pricer, session, probe, run)) or done[-1])
        for one in runs:
            measured.add(probe, sample(probe, pricer.workflow, one))  # work behind loops is scaled in _probed
        for stage, known in truth.stages.items():
            cell, samples = probe.cell(stage), measured.stages[stage]
            samples.resident[cell], samples.working[cell] = (at(*cell) for at in (known.resident, known.working))
        steps = [loop.chunk_steps for one in done[-1:] for loop in one.run.loops.values()]
        measured.chunk_steps = max(steps, default=1)
        probe_s[probe.name] = sum(one.seconds for one in done)

    for probe in planned:
        for tried in (probe, switching(probe)):  # the second if a device cannot hold all of its stages at once
            try:
                measure(tried)
                break
            except WorkerError:
                if tried is not probe and probe is planned[0]:
                    raise
    for stage, known in truth.stages.items():
        samples = measured.stages[stage]
        samples.offloaded_bytes = None if known.stays else known.offloaded_bytes
        samples.offload_s, samples.onload_s, samples.cores = known.offload_s, known.onload_s, known.cores_per_device
    profile = profile_of(f"{truth.name} (EMULATED)", pricer.cluster, measured, truth.fingerprint)
    tails = {n: replace(s, finish_quantiles=truth.stages[n].finish_quantiles) for n, s in profile.stages.items()}
    return replace(profile, stages=tails, workload=truth.workload), probe_s


def _probed(pricer: Pricer, session: Session, probe: Probe, run: Workflow) -> Iteration:
    """Returns an iteration of a shortened workflow, in emulated seconds; stages behind loops are scaled accordingly."""
    stages = dict(pricer.profile.stages)
    for name, loop in run.loops.items():
        for stage in run.downstream(*loop.sides):
            share = loop.chunk_steps / pricer.workflow.loops[name].chunk_steps
            stages[stage] = replace(stages[stage], seconds=stages[stage].seconds * share)
    shorter = Pricer(run, replace(pricer.profile, stages=stages), pricer.cluster)
    (done,) = iterations(shorter, session, probe.plan, [time_scale(shorter, probe.plan)])
    return Iteration(run, done.due, done.end_s)
