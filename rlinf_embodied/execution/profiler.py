"""Measures the real stages of a workflow in real workers, by running a few small plans (planning/probes.py).

    for each probe    build its stages -> a short rollout (what is done once is done then) -> some whole iterations
                      spans -> seconds, meters -> memory and cores, answers -> bytes per edge; then all is forgotten
    at the end        the wire between two workers; a profile in the form of planning/profile_file.py

Iterations of a profile train a policy of their own: the stages are built for it and dropped behind it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rlinf_embodied.cache import cache_root
from rlinf_embodied.cluster.hardware import Cluster, processor
from rlinf_embodied.errors import NoRoomError, PlanError
from rlinf_embodied.execution.disturbance import Moment, Repetition, busy_s, chosen, shares
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.iteration import Finishes
from rlinf_embodied.execution.meter import METER, MeteredSession, Reading, measure_links
from rlinf_embodied.planning.measurement import Measurements, Memory, cell_of, profile_dict, samples
from rlinf_embodied.planning.probes import Probe, probes, shortened, switching, warm_up
from rlinf_embodied.planning.profile import DISTURBED, Profile, parse_profile
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.residents import can_leave
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.targets import load_target
from rlinf_embodied.telemetry.run_folder import library_versions
from rlinf_embodied.workflow.graph import Workflow

ShowProgress = Callable[[str, int, int, str], None]  # (what, done, total, remark)

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of what is measured and how
_BUDGET_S = 36.0  # of repetitions, over all probes
_MOST_REPETITIONS, _LEAST_REPETITIONS = 5, 2
_AGAIN = 3  # further repetitions of a probe that is disturbed
_WARM_STEPS = 2  # chunk-steps of the first rollouts


@dataclass(slots=True)
class _Budget:
    """How long the loops of the repetitions are, and until when a probe may repeat."""

    share: float  # of the chunk-steps
    probe_s: float


# ---------------------------------------------------------------------------------------------------------------- cache
def fingerprint(cluster: Cluster, parts: Mapping[str, object]) -> dict[str, str]:
    """Returns what a profile is valid for: this hardware, these libraries, and the given parts of the config."""
    hardware = f"{platform.machine()} {processor()}, {cluster.num_cores} cores, {cluster.description}"
    libraries = ("python", "torch", "ray", "mani_skill", "sapien", "numpy", "transformers")
    versions = {k: v for k, v in library_versions().items() if k in libraries}
    text = json.dumps(parts, sort_keys=True, default=str)
    return {
        "hardware": f"{hardware}, {cluster.num_devices} devices",
        "libraries": json.dumps(versions, sort_keys=True),
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "version": str(_VERSION),
    }


def cached_path(root: str, name: str, key: Mapping[str, str]) -> Path:
    """Returns where the profile of a fingerprint is kept; RLINF_EMBODIED_CACHE moves `root`."""
    folder = cache_root(root) / "profiles"
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}-{digest}.json"


def store_profile(path: Path, data: Mapping[str, object]) -> None:
    """Writes a profile so that readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


# -------------------------------------------------------------------------------------------------------------- measure
def measure(
    workflow: Workflow,
    session: Session,
    cluster: Cluster,
    name: str,
    key: Mapping[str, str],
    progress: ShowProgress,
    budget_s: float = _BUDGET_S,
) -> tuple[Profile, dict[str, object]]:
    """Returns the profile of a workflow on a cluster, also in the form of its file.

    The session's workers are left as they were started: whatever stages they had are gone.

    Args:
        workflow: its stages are built several times, and forgotten.
        session: where the probes run.
        cluster: its devices.
        name: of the profile.
        key: what it is valid for, see `fingerprint`.
        progress: called with (what, done, total, remark).
        budget_s: seconds for the repetitions; a slow workflow is measured with shorter rollouts, as far as these stand
            for whole ones.
    """
    metered, measured = MeteredSession(session), Measurements()
    planned = probes(workflow, cluster)
    total = len(planned) * (1 + _LEAST_REPETITIONS)
    budget: _Budget | None = None
    start = time.time()
    for number, planned_probe in enumerate(planned):
        done = number * (1 + _LEAST_REPETITIONS)
        progress("profile", done, total, planned_probe.name)
        probe, executor, short_s = _built(planned_probe, metered, cluster)
        budget = budget or _budget(workflow, cluster, short_s, budget_s, len(planned))
        advance = lambda k, at=done, what=probe.name: progress("profile", at + k, total, what)  # noqa: E731
        _repeat(executor, probe, metered, measured, budget, workflow.num_blocks, advance)
        _count_bytes(probe, metered, measured, executor.workflow)
        _switches(executor, probe, metered, measured, cluster)
        _weights(executor, probe, metered, measured)
    metered.clear()
    measured.links = _links(session, cluster, workflow.num_blocks)
    session.clear()
    measured.sources |= _sources(workflow, measured)
    told = f", disturbed: work waited up to {measured.disturbed:.0%} of its time for a core that others had"
    progress("profile", total, total, f"{time.time() - start:.0f} s{told if measured.disturbed > DISTURBED else ''}")
    data = profile_dict(name, workflow, cluster.node_groups()[0].kind, measured, key)
    return parse_profile(data, f"the profile of {name}"), data


def _links(session: Session, cluster: Cluster, num_blocks: int) -> dict[str, float]:
    """Measures the wire within the first node, and to the next one, between workers that the probes have started."""
    links: dict[str, float] = {}
    for name, worker in link_ends(cluster, num_blocks).items():
        devices = {k: cluster.torch_device(k) for k in (0, worker)}
        latency_s, bytes_per_s = measure_links(session, devices, max(1, num_blocks // 2))
        links[name] = bytes_per_s
        links["latency_s"] = max(latency_s, links.get("latency_s", 0.0))
    return links


def link_ends(cluster: Cluster, num_blocks: int) -> dict[str, int]:
    """Returns the worker with which worker 0 measures each kind of link that the devices in use have."""
    first = cluster.place_of(0).node
    ends: dict[str, int] = {}
    for worker in (*range(1, min(cluster.num_computing, num_blocks)), *cluster.cores_beside[:1]):
        near = cluster.place_of(worker).node == first
        ends.setdefault("within_node_bytes_per_s" if near else "across_nodes_bytes_per_s", worker)
    return ends


def _built(probe: Probe, metered: MeteredSession, cluster: Cluster) -> tuple[Probe, Executor, float]:
    """Returns a probe with its stages built and warm, and the seconds of a short iteration.

    Where a device does not hold all stages, they take turns in it.

    Raises:
        NoRoomError: there is no room even so; says what was without room first.
    """
    metered.clear()
    try:
        executor = Executor(probe.workflow, probe.plan, metered, cluster)
        return probe, executor, _warm(executor, probe)
    except NoRoomError as error:
        _LOG.info("profile: %s: the stages switch: %s", probe.name, error)
        first = NoRoomError(str(error), error.workers)  # its frames would hold what the call had in memory
    metered.clear()
    other = switching(probe)
    try:
        executor = Executor(other.workflow, other.plan, metered, cluster)
        return other, executor, _warm(executor, other)
    except (NoRoomError, PlanError) as error:
        raise first from error


def _step_context(probe: Probe, repetition: int) -> StepContext:
    return StepContext(probe.workflow.typical_iteration + repetition)


def _warm(executor: Executor, probe: Probe) -> float:
    """Runs two short iterations, as a run's first one, and returns the seconds of the second."""
    seconds = 0.0
    for _ in range(2):
        executor.workflow = warm_up(probe.workflow, _WARM_STEPS)
        start = time.perf_counter()
        executor.run(StepContext(0))
        seconds = time.perf_counter() - start
    executor.workflow = probe.workflow
    return seconds


def _budget(workflow: Workflow, cluster: Cluster, short_s: float, budget_s: float, num_probes: int) -> _Budget:
    """Returns how much of the loops can be run, from a short iteration on all devices."""
    steps = max((loop.chunk_steps for loop in workflow.loops.values()), default=_WARM_STEPS)
    whole_s = short_s * max(1.0, steps / _WARM_STEPS)
    devices = min(cluster.num_computing, workflow.num_blocks)
    all_s = _LEAST_REPETITIONS * whole_s * (num_probes - 1 + devices)
    return _Budget(min(1.0, budget_s / all_s) if all_s else 1.0, budget_s / num_probes)


def _repeat(
    executor: Executor,
    probe: Probe,
    metered: MeteredSession,
    measured: Measurements,
    budget: _Budget,
    num_blocks: int,
    progress: Callable[[int], None],
) -> None:
    """Runs a probe's iterations and files what they showed."""
    executor.workflow = run = shortened(probe.workflow, budget.share)
    measured.chunk_steps = max((loop.chunk_steps for loop in run.loops.values()), default=1)
    metered.reset_peaks()
    before, started = metered.readings(), time.perf_counter()
    found: list[Repetition] = []
    watched = not probe.cluster.nodes  # of other machines the driver does not know what else they do
    while not _enough(found, time.perf_counter() - started > budget.probe_s):
        begun = _moment(metered)
        metered.recording = not found
        result = executor.run(_step_context(probe, len(found)))
        metered.recording = False
        rounds = run.rounds(result.reports)
        if rounds and probe.workflow.num_blocks == num_blocks:
            measured.rounds.append(max(rounds.values()))
        _file_finishes(run, result, measured)
        spans = tuple(result.spans)
        found.append(Repetition(spans, rounds, shares(begun, _moment(metered), spans) if watched else {}))
        progress(min(len(found), _LEAST_REPETITIONS))
    collective = [stage for stage, spec in run.stages.items() if spec.collective]
    kept, disturbed = chosen(found, _LEAST_REPETITIONS, collective)
    measured.disturbed = max(measured.disturbed, disturbed)
    for one in kept:
        measured.samples += samples(probe, run, probe.workflow, one.spans, one.rounds)
    _file_memory(executor, probe, metered, measured, before, time.perf_counter() - started)


def _moment(metered: MeteredSession) -> Moment:
    readings = metered.readings()
    used = {os.getpid(): sum(os.times()[:2])} | {reading.process: reading.cpu_s for reading in readings.values()}
    waited = {worker: reading.waited_s for worker, reading in readings.items()}
    return Moment(time.perf_counter(), busy_s(), used, waited)


def _enough(found: Sequence[Repetition], late: bool) -> bool:
    """Returns whether a probe was repeated often enough; one that is disturbed gets more chances to be quiet."""
    quiet = sum(one.is_quiet for one in found)
    if quiet >= _LEAST_REPETITIONS:
        return late or quiet >= _MOST_REPETITIONS
    return len(found) >= _LEAST_REPETITIONS + _AGAIN


def _file_finishes(run: Workflow, result: IterationResult, measured: Measurements) -> None:
    """Files when each block of a stage with long tails was finished, as its reports say."""
    for stage, spec in run.stages.items():
        if spec.at_once:
            found = [report.finish_s for report in result.all_of(stage, Finishes)]
            measured.finishes.setdefault(stage, []).extend(found)


def _file_memory(
    executor: Executor,
    probe: Probe,
    metered: MeteredSession,
    measured: Measurements,
    before: Mapping[int, Reading],
    seconds: float,
) -> None:
    """Files resident and working bytes and CPU cores; what ran together cannot be told apart, and shares the peak.

    So do stages that switch: each is said to reach it, whichever did.
    """
    after = metered.readings()
    for stage in probe.workflow.stages:
        memory = measured.memory.setdefault(stage, Memory())
        workers = executor.workers(stage)
        cell = cell_of(probe, stage)
        memory.resident[cell] = metered.resident[stage]
        held = before if not probe.plan.exclusive()[stage] else metered.empty_with(metered.resident[stage])
        memory.working[cell] = max(max(0.0, after[w].peak_bytes - held[w].used_bytes) for w in workers)
        cores = max((after[w].cpu_s - before[w].cpu_s) / seconds for w in workers)
        memory.cores = max(1.0, round(cores))


# ------------------------------------------------------------------------------------------------- edges and switches
def _count_bytes(probe: Probe, metered: MeteredSession, measured: Measurements, run: Workflow) -> None:
    """Counts what an item's data holds, on every edge whose data left its worker."""
    whole = probe.workflow
    ends = [(edge.source, edge.target) for edge in whole.edges]
    for source, target in ends:
        loop = whole.loop_of(source)
        found = metered.bytes_per_block(source, "close" if loop else "run")
        if found is not None:
            longer = whole.loops[loop.name].chunk_steps / run.loops[loop.name].chunk_steps if loop else 1.0
            measured.edge_bytes_per_item[source, target] = found * longer / whole.items_per_block
    for loop in whole.loops.values():
        for source, target in loop.hops():
            found = metered.bytes_per_block(source, "step")
            if found is not None:
                measured.edge_bytes_per_item[source, target] = found / whole.items_per_block
    metered.answers = []


def _switches(
    executor: Executor, probe: Probe, metered: MeteredSession, measured: Measurements, cluster: Cluster
) -> None:
    """Times offload and onload of the stages that can leave their device, and reads what they leave there."""
    for stage, spec in probe.workflow.stages.items():
        memory = measured.memory[stage]
        worker = executor.workers(stage)[0]
        if memory.offloaded_bytes is not None or not can_leave(load_target(spec.target), cluster.torch_device(worker)):
            continue
        metered.ask(worker, stage, "enter", _step_context(probe, 0))
        before = metered.readings()[worker].used_bytes
        start = time.perf_counter()
        metered.ask(worker, stage, "offload", _step_context(probe, 0))
        memory.offload_s = time.perf_counter() - start
        freed = before - metered.readings()[worker].used_bytes
        start = time.perf_counter()
        metered.ask(worker, stage, "onload", _step_context(probe, 0))
        memory.onload_s = time.perf_counter() - start
        memory.offloaded_bytes = max(0.0, max(memory.resident.values()) - freed)


def _weights(executor: Executor, probe: Probe, metered: MeteredSession, measured: Measurements) -> None:
    """Times one export and one install along each weight edge, the wire between the two included."""
    for edge in probe.workflow.weight_edges:
        ends = edge.source, edge.target
        if ends in measured.weights:
            continue
        step_context = _step_context(probe, 0)
        exports, installs, size = [], [], 0.0
        giver, taker = executor.workers(edge.source)[0], executor.workers(edge.target)[-1]
        for _ in range(3):
            start = time.perf_counter()
            weights = metered.publish(giver, edge.source, "export_weights", step_context)
            exports.append(time.perf_counter() - start)
            start = time.perf_counter()
            metered.ask(taker, edge.target, "install_weights", step_context, payloads=[weights])
            installs.append(time.perf_counter() - start)
            size = cast(float, metered.ask(taker, METER.name, "count", payloads=[weights]))
        # both times hold the wire, so no bytes are left for the planner to send
        seconds = {"export_s": statistics.median(exports), "install_s": statistics.median(installs)}
        measured.weights[ends] = {"bytes": 0.0, **seconds}
        measured.sources[f"weights.{edge.source}->{edge.target}"] = (
            f"measured with the wire, {size:.0f} bytes from worker to worker"
        )


def _sources(workflow: Workflow, measured: Measurements) -> dict[str, str]:
    steps = max((loop.chunk_steps for loop in workflow.loops.values()), default=1)
    return {
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        "stages": f"rollouts of {measured.chunk_steps} of {steps} chunk-steps; stages behind them in proportion",
        "cells": "measured where a probe ran (planning/probes.py), elsewhere by the rules of planning/measurement.py",
        "working_bytes": "the peak of a worker, alike for all of its stages",
    }
