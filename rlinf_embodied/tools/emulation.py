"""Runs plans on clusters that are only described: the real executor and workers, with stages that sleep.

What is measured rests on the same times of single calls as what is predicted (a profile's), and on nothing else of the
planner: which calls overlap, wait and follow each other comes from running them.  See emulated_stage.py for the clock.
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
_WARM_UP = 0.1  # the first iteration has no switch back before it and is not counted: it may be this much faster
LEAST_S = 4.0  # wall seconds of an iteration, so that the last hop's overhead is below a percent
_NUMBERS = itertools.count(1)  # of iterations, by which workers distinguish them
S_PER_CALL = 0.003  # wall seconds that two cores need for a call from submission to receipt, with room to spare


@dataclass(frozen=True, slots=True)
class Emulated:
    """A plan's iterations on emulated devices; seconds are emulated ones unless stated otherwise."""

    plan: Plan
    predicted_s: float
    measured_s: tuple[float, ...]  # of each iteration
    due_s: tuple[float, ...]  # the same without this machine's own slowness: by the deadlines of the calls
    peak_bytes: float  # of any device
    wall_s: float  # of all iterations
    scale: float


@dataclass(frozen=True, slots=True)
class Iterated:
    """One iteration."""

    begin: Start
    end_s: float  # emulated seconds by the deadlines of its calls, over all iterations
    due: tuple[Span, ...]  # of its calls by their deadlines, in emulated seconds
    spans: tuple[Span, ...]  # of its calls on the wall clock
    peak_bytes: float


def time_scale(pricer: Pricer, plan: Plan) -> float:
    """Returns wall seconds per emulated second at which one machine keeps up with a plan's calls."""
    found = simulate(plan, pricer)
    return max(LEAST_S, found.calls * S_PER_CALL) / found.iteration_s


def iterations(pricer: Pricer, session: Session, plan: Plan, scales: Sequence[float]) -> list[Iterated]:
    """Runs iterations of a plan, one for each scale in wall seconds per emulated second.

    Raises:
        WorkerError: the plan needs more memory than a device has.
    """
    session.clear()  # or stages of the plan before would be switched out for those of this one
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
    """Runs a plan for an uncounted iteration (and as many as its fronts run ahead), then for so many.

    The session's workers are left with the plan's stages.  `scale` are wall seconds per emulated second; None: as fast
    as this machine can keep up with.
    """
    assert pricer.cluster.emulated, f"cluster {pricer.cluster.name} is a real one"
    scale, before = scale or time_scale(pricer, plan), 1 + plan.staleness
    counted = iterations(pricer, session, plan, [scale * _WARM_UP] * before + [scale] * num_iterations)[before:]
    return Emulated(
        plan=plan,
        predicted_s=simulate(plan, pricer).iteration_s,
        measured_s=tuple((max(span.end_s for span in one.spans) - one.begin.wall_s) / scale for one in counted),
        due_s=tuple(one.end_s - one.begin.begin_s for one in counted),
        peak_bytes=max(one.peak_bytes for one in counted),
        wall_s=time.time() - counted[0].begin.wall_s,
        scale=scale,
    )


def emulated_workflow(pricer: Pricer, run: str) -> Workflow:
    """Returns the workflow with every stage replaced by one that sleeps, for a run of that name."""
    workflow, run = pricer.workflow, f"{run} {uuid.uuid4().hex[:8]}"  # keeps apart what shares workers
    stages = {
        name: replace(
            spec,
            target=_TARGET,
            config=_config(pricer, spec, run),
            at_once=bool(pricer.profile.stages[name].finish_quantiles),
        )
        for name, spec in workflow.stages.items()
    }
    repeat = workflow.repeat and replace(workflow.repeat, decide=partial(decided, workflow.repeat.expected_rounds))
    return replace(workflow, stages=stages, repeat=repeat)


def decided(expected: float, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
    """Ends a repeat so that over the iterations it takes its expected number of rounds on average."""
    start = of_type(rounds[0], Finish)[0].start
    wanted = int((start.iteration + 1) * expected) - int(start.iteration * expected)
    return RepeatDecision(len(rounds) >= wanted, message=start)


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
    """Does what a launch with plan=auto does before its first iteration, on emulated devices.

    Memory, switches and bytes are not emulated: they are those of the profile that the devices sleep by.

    Returns:
        the profile that the probes measure, and the emulated seconds that each of them took.
    """
    truth, planned, probe_s = pricer.profile, probes(pricer.workflow, pricer.cluster), dict[str, float]()
    effort = Effort(pricer.workflow, planned, PlanConfig().profile_budget_s)
    measured = Measurements(pricer.workflow, edge_bytes_per_item=dict(truth.edge_bytes_per_item))
    measured.weights |= truth.weights

    def measure(probe: Probe) -> None:
        done: list[Iteration] = []
        found, _ = effort.measure(probe, lambda run, *_: done.append(_probed(pricer, session, probe, run)) or done[-1])
        for one in found:
            measured.add(probe, sample(probe, pricer.workflow, one))  # in proportion, see _probed
        for stage, known in truth.stages.items():
            cell, shown = probe.cell(stage), measured.stages[stage]
            shown.resident[cell], shown.working[cell] = (at(*cell) for at in (known.resident, known.working))
        steps = [loop.chunk_steps for one in done[-1:] for loop in one.run.loops.values()]
        measured.chunk_steps = max(steps, default=1)
        probe_s[probe.name] = sum(one.seconds for one in done)

    for probe in planned:
        for tried in (probe, switching(probe)):  # where a device does not hold all of its stages, or even one
            try:
                measure(tried)
                break
            except WorkerError:
                if tried is not probe and probe is planned[0]:
                    raise
    for stage, known in truth.stages.items():
        shown = measured.stages[stage]
        shown.offloaded_bytes = None if known.stays else known.offloaded_bytes
        shown.offload_s, shown.onload_s, shown.cores = known.offload_s, known.onload_s, known.cores_per_device
    profile = profile_of(f"{truth.name} (EMULATED)", pricer.cluster, measured, truth.fingerprint)
    tails = {n: replace(s, finish_quantiles=truth.stages[n].finish_quantiles) for n, s in profile.stages.items()}
    return replace(profile, stages=tails, workload=truth.workload), probe_s


def _probed(pricer: Pricer, session: Session, probe: Probe, run: Workflow) -> Iteration:
    """Returns an iteration of a shortened workflow, in emulated seconds, with as much less work behind loops."""
    stages = dict(pricer.profile.stages)
    for name, loop in run.loops.items():
        for stage in run.downstream(*loop.sides):
            share = loop.chunk_steps / pricer.workflow.loops[name].chunk_steps
            stages[stage] = replace(stages[stage], seconds=stages[stage].seconds * share)
    shorter = Pricer(run, replace(pricer.profile, stages=stages), pricer.cluster)
    (done,) = iterations(shorter, session, probe.plan, [time_scale(shorter, probe.plan)])
    return Iteration(run, done.due, done.end_s)
