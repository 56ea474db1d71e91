"""Measures the real stages of a workflow in real workers, by running a few small plans (planning/probes.py).

    for each probe    build its stages -> a short iteration to warm up -> some iterations
                      spans -> seconds, meters -> memory and cores, answers -> bytes per edge; then stages are dropped
    at the end        a profile

Iterations of a profile train a copy of the policy: its stages are built for the profile and dropped afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rlinf_embodied.cache import cache_root
from rlinf_embodied.cluster.hardware import Cluster, processor
from rlinf_embodied.config import PlanConfig
from rlinf_embodied.errors import NoRoomError, PlanError, write_whole
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.iteration import Finishes
from rlinf_embodied.execution.meter import MeteredSession, Reading
from rlinf_embodied.planning import probes
from rlinf_embodied.planning.probes import Cell, Iteration, Probe
from rlinf_embodied.planning.profile import Profile, WeightProfile
from rlinf_embodied.plug_ins import load_target, source_digest, targets_of
from rlinf_embodied.runtime.host import StepContext, can_leave
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import library_versions
from rlinf_embodied.workflow.graph import Workflow

ShowProgress = Callable[[str, int, int, str], None]  # (what, done, total, remark)

_LOG = logging.getLogger(__name__)
_VERSION = 6  # of the method of measurement
_REPETITIONS = 5  # more if the seconds vary
_LONG_TAILED = 3  # at least, even beyond the budget, if few long episodes decide the seconds of an iteration
_UNCERTAIN = 0.05  # standard error of the mean seconds, relative to it, up to which no more repetitions are run
_PATIENCE = 8  # multiple of the budget that probes may take until their runs represent whole or typical ones
_LONGEST = 20  # multiple of the budget that all probes may take; later ones are built to measure memory, but not run
_WARM_STEPS = 2  # chunk-steps of the first iterations


def fingerprint(cluster: Cluster, parts: Mapping[str, object]) -> dict[str, str]:
    """Returns the conditions of a profile's validity: hardware, libraries, the given parts of the config, and code."""
    hardware = f"{platform.machine()} {processor()}, {cluster.num_cores} cores, {cluster.description}"
    libraries = ("python", "torch", "ray", "mani_skill", "sapien", "numpy", "transformers")
    versions = {k: v for k, v in library_versions().items() if k in libraries}
    text = json.dumps(parts, sort_keys=True, default=str)
    return {
        "hardware": f"{hardware}, {cluster.num_devices} devices",
        "libraries": json.dumps(versions, sort_keys=True),
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "code": source_digest(["rlinf_embodied", *targets_of(parts)])[:16],
        "version": str(_VERSION),
    }


def cached_path(root: str, name: str, key: Mapping[str, str]) -> Path:
    """Returns the path of a fingerprint's cached profile; RLINF_EMBODIED_CACHE overrides `root`."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_root(root) / "profiles" / f"{name}-{digest}.json"


def store_profile(path: Path, profile: Profile) -> None:
    """Writes a profile, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(profile.to_dict(), indent=1) + "\n")


def measure(
    workflow: Workflow,
    session: Session,
    cluster: Cluster,
    name: str,
    key: Mapping[str, str],
    progress: ShowProgress,
    budget_s: float = PlanConfig().profile_budget_s,
) -> Profile:
    """Returns the profile of a workflow on a cluster; the session's workers are left without stages.

    Its stages are built several times.  `key` is the profile's `fingerprint`; `budget_s` are the seconds for
    repetitions: rollouts are shortened accordingly, to no less than a quarter.
    """
    start, planned = time.time(), probes.probes(workflow, cluster)
    profiling = _Profiling(workflow, session, cluster, planned, budget_s)
    for number, probe in enumerate(planned):
        progress("profile", number, len(planned), f"{probe.name}, {probe.most_blocks} blocks on a device")
        profiling.run(probe)
    profiling.finish()
    progress("profile", len(planned), len(planned), f"{time.time() - start:.0f} s")
    return probes.profile_of(name, cluster, profiling.measured, key)


@dataclass(frozen=True, slots=True)
class _Grown:
    """Bytes by which building a stage made a worker larger."""

    stage: str
    cell: Cell
    worker: int
    grown: float
    shares: bool  # whether the worker already had the other end of its weight edge
    first: bool  # whether the worker had no stages before, so that the growth includes libraries and contexts


class _Profiling:
    """Runs probes and records their measurements."""

    def __init__(
        self, workflow: Workflow, session: Session, cluster: Cluster, planned: Sequence[Probe], budget_s: float
    ) -> None:
        self._workflow, self._session, self._cluster, self._planned = workflow, session, cluster, planned
        self._metered = MeteredSession(session)
        self._effort = Effort(workflow, planned, budget_s)
        self._grown: list[_Grown] = []
        self._took: dict[tuple[str, str], tuple[int, int]] = {}  # workers that sent and got the weights of an edge
        self.measured = probes.Measurements(workflow)

    def run(self, probe: Probe) -> None:
        """Measures a probe; if a device is too small for all of its stages, they are offloaded in turn.

        Raises:
            NoRoomError: the first probe does not fit even so; the message names the stage that failed first.
        """
        try:
            return self._run(probe)
        except NoRoomError as error:
            _LOG.info("profile: %s: the stages switch: %s", probe.name, error)
            first = NoRoomError(str(error), error.workers)  # its frames would hold what the call had in memory
        try:
            return self._run(probes.switching(probe))
        except (NoRoomError, PlanError) as error:
            if probe is self._planned[0]:
                raise first from error
            _LOG.info("profile: %s is left out: %s", probe.name, error)

    def _run(self, probe: Probe) -> None:
        self._metered.clear()
        executor = Executor(probe.workflow, probe.plan, cast(Session, self._metered), self._cluster)
        before, started = self._metered.readings(), time.perf_counter()
        iterations, short = self._effort.measure(probe, functools.partial(self._iterate, executor))
        seconds = time.perf_counter() - started
        if iterations:
            self._record(probe, iterations, short)
        self._record_memory(probe, executor, before, seconds)
        if iterations and not probe.kind:
            self._count_bytes(iterations[0].run)
            self._time_switches(probe, executor)
            self._time_weights(probe, executor)

    def finish(self) -> None:
        """Subtracts the transfer time from the times of weights, and drops all stages."""
        measured, cluster = self.measured, self._cluster
        self._metered.clear()
        self._record_residents()
        self._session.clear()
        for ends, (sender, receiver) in self._took.items():
            weights = measured.weights[ends]
            near = cluster.place_of(sender).node == cluster.place_of(receiver).node
            links = cluster.links
            rate = links.within_node_bytes_per_s if near else links.across_nodes_bytes_per_s
            wire_s = 0.0 if sender == receiver else weights.bytes / rate + links.latency_s
            measured.weights[ends] = replace(weights, install_s=max(0.0, weights.install_s - wire_s))
        steps = max((loop.chunk_steps for loop in self._workflow.loops.values()), default=1)
        measured.sources |= {
            "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
            "probes": ", ".join(f"{p.name} ({p.most_blocks} blocks on a device)" for p in self._planned),
            "stages": f"rollouts of {measured.chunk_steps} of {steps} chunk-steps, a line through two behind them",
            "cells": "measured where a probe ran, elsewhere by the rules of planning/probes.py",
            "working_bytes": "the peak of a worker in calls of the stage; alike for both sides of a loop in one call",
        }

    def _iterate(self, executor: Executor, run: Workflow, number: int, record: bool = False) -> Iteration:
        """Runs an iteration; with `record`, bytes and memory peaks are recorded and replace earlier records."""
        if record:
            self._metered.forget()
        self._metered.recording = record
        start = time.perf_counter()
        executor.workflow = run
        result = executor.run(StepContext(number))
        seconds, self._metered.recording = time.perf_counter() - start, False
        finishes = {
            stage: [report.finish_s for report in result.all_of(stage, Finishes)]
            for stage, spec in run.stages.items()
            if spec.at_once
        }
        return Iteration(run, result.spans, seconds, run.rounds(result.reports), finishes)

    def _record(self, probe: Probe, iterations: Sequence[Iteration], short: Iteration | None) -> None:
        """Records the seconds of a probe's iterations."""
        measured, whole, run = self.measured, self._workflow, iterations[0].run
        measured.chunk_steps = max((loop.chunk_steps for loop in run.loops.values()), default=1)
        is_whole = (run.num_blocks, run.loops, run.repeat) == (whole.num_blocks, whole.loops, whole.repeat)
        for iteration in iterations:
            measured.rounds += [max(iteration.rounds.values())] if iteration.rounds and is_whole else []
            for stage, finishes in iteration.finishes.items():
                measured.stages[stage].finishes += finishes
            measured.add(probe, probes.sample(probe, whole, iteration, short))

    def _record_residents(self) -> None:
        """Records resident bytes without a worker's overhead, which its first stages loaded in their order.

        The overhead, and what the process held before, are added to the working bytes of every call instead, of which
        a device counts only the largest.
        """
        self._metered.restart()
        overhead = self._metered.overhead
        remaining = dict(overhead)
        for one in self._grown:
            taken = min(one.grown, remaining[one.worker]) if one.first else 0.0
            remaining[one.worker] -= taken
            profile = self.measured.stages[one.stage]
            table = profile.sharing if one.shares else profile.resident
            table[one.cell] = max(table.get(one.cell, 0.0), one.grown - taken)
        most = max(kept + self._metered.start_bytes[worker] for worker, kept in overhead.items())
        for profile in self.measured.stages.values():
            profile.working = {cell: held + most for cell, held in profile.working.items()}

    def _record_memory(self, probe: Probe, executor: Executor, before: Mapping[int, Reading], seconds: float) -> None:
        """Records resident bytes and, if iterations ran, working bytes and CPU cores.

        Both sides of a loop that is one call per worker get its peak.  The cores of a stage are limited to those of its
        device.  `before` was read before the iterations, which took `seconds`.
        """
        earlier: set[str] = set()
        peaks, after = self._metered.peaks(), self._metered.readings()
        for stage in probe.workflow.order():
            profile, workers, cell = self.measured.stages[stage], executor.workers(stage), probe.cell(stage)
            partners = {e.target for e in probe.workflow.weight_edges if e.source == stage} & earlier
            sharing = {worker for partner in partners for worker in executor.workers(partner)}
            grown, empty, known = self._metered.grown[stage], self._metered.empty, self._metered.overhead
            self._grown += [_Grown(stage, cell, w, grown[w], w in sharing, w not in known) for w in workers]
            earlier.add(stage)
            if not peaks:
                continue
            alone = probe.plan.excluded()[stage]
            held = {w: empty[w].used_bytes + grown[w] if alone else before[w].used_bytes for w in workers}
            working = max(max(0.0, peaks[stage, w] - held[w]) for w in workers)
            profile.working[cell] = max(profile.working.get(cell, 0.0), working)
            limit = max(self._cluster.place_of(w).group.cores_per_device for w in workers)
            cores = max((after[w].cpu_s - before[w].cpu_s) / seconds for w in workers)
            profile.cores = max(min(1.0, limit), min(limit, cores))

    def _count_bytes(self, run: Workflow) -> None:
        """Records the bytes per item of every edge, and hop of a loop, in the recorded iteration."""
        whole, per_item, per_block = self._workflow, self.measured.edge_bytes_per_item, self._metered.bytes_per_block()
        ends = [(edge.source, edge.target, whole.loop_of(edge.source)) for edge in whole.edges]
        for source, target, loop in ends:
            size = per_block.get((source, "close" if loop else "run"))
            if size is not None:
                longer = loop.chunk_steps / run.loops[loop.name].chunk_steps if loop else 1.0
                per_item[source, target] = size * longer / whole.items_per_block
        for source, target in (hop for loop in whole.loops.values() for hop in loop.hops()):
            if (source, "step") in per_block:
                per_item[source, target] = per_block[source, "step"] / whole.items_per_block

    def _time_switches(self, probe: Probe, executor: Executor) -> None:
        """Times offload and onload of the stages that can leave their device, and reads the bytes that stay there."""
        metered, number = self._metered, probe.workflow.typical_iteration
        for stage, spec in probe.workflow.stages.items():
            profile, worker = self.measured.stages[stage], executor.workers(stage)[0]
            target = load_target(spec.target)
            if profile.offloaded_bytes is not None or not can_leave(target, self._cluster.torch_device(worker)):
                continue
            metered.ask([worker], stage, "enter", number)
            before = metered.readings()[worker].used_bytes
            profile.offload_s = metered.seconds_of(worker, stage, "offload", number)
            freed = before - metered.readings()[worker].used_bytes
            profile.onload_s = metered.seconds_of(worker, stage, "onload", number)
            profile.offloaded_bytes = max(0.0, metered.grown[stage][worker] - freed)

    def _time_weights(self, probe: Probe, executor: Executor) -> None:
        """Times export and install along each weight edge, between different workers if there are several."""
        number = probe.workflow.typical_iteration
        for edge in probe.workflow.weight_edges:
            ends = (edge.source, edge.target)
            sender, receiver = executor.workers(edge.source)[0], executor.workers(edge.target)[-1]
            if ends in self._took and (sender == receiver or self._took[ends][0] != self._took[ends][1]):
                continue
            exports, installs, size = [0.0, 0.0], [0.0, 0.0], 0
            for at in executor.parts_of(edge.source, StepContext(number)):
                for k in range(2):
                    start = time.perf_counter()
                    weights, part_bytes = self._metered.publish(sender, edge.source, "export_weights", at)
                    exports[k] += time.perf_counter() - start
                    taken = self._metered.seconds_of(receiver, edge.target, "install_weights", number, [weights])
                    installs[k] += taken
                size += part_bytes
            self._took[ends] = sender, receiver
            seconds = statistics.median(exports), statistics.median(installs)
            self.measured.weights[ends] = WeightProfile(size, *seconds)


class Effort:
    """Runs as much of the probes as the budget allows.

    Rollouts have at least a quarter of their chunk-steps, unless that takes very long.  If the first iteration exceeds
    the budget and the workflow has no loops to shorten, it is the measurement.
    """

    def __init__(self, workflow: Workflow, planned: Sequence[Probe], budget_s: float) -> None:
        self._loops, self._budget_s = workflow.loops.values(), budget_s
        self._blocks = [probe.most_blocks for probe in planned]
        self._chunk_steps = 0  # not known before the first short iteration
        self._spent_s = 0.0

    def measure(
        self, probe: Probe, iterate: Callable[[Workflow, int, bool], Iteration]
    ) -> tuple[list[Iteration], Iteration | None]:
        """Runs iterations of a probe; returns those that count and, for a workflow with loops, a shorter one.

        Once earlier probes have far exceeded the budget, none are run.  `iterate(workflow, number, record)` runs one
        iteration.
        """
        if self._spent_s > _LONGEST * self._budget_s:
            return [], None
        numbers = itertools.count(
            max(1, probe.workflow.typical_iteration)
        )  # no number twice: versions of weights follow from them
        start, short = time.perf_counter(), None
        first = iterate(probes.shortened(probe.workflow, _WARM_STEPS), 0, not self._loops)
        is_long = first.seconds > self._budget_s
        if self._loops and not is_long:
            short = iterate(first.run, next(numbers), False)  # without the lazy initialisation of the first one
        self._chunk_steps = self._chunk_steps or self._affordable_steps((short or first).seconds)
        iterations = [first] if is_long and not self._loops else []
        run = probes.shortened(probe.workflow, self._chunk_steps)
        share_s = self._budget_s * probe.most_blocks / sum(self._blocks)
        least = _LONG_TAILED if any(spec.at_once for spec in probe.workflow.stages.values()) else 1
        while not iterations or _repeats([each.seconds for each in iterations], share_s, least):
            iterations.append(iterate(run, next(numbers), not iterations))
        self._spent_s += time.perf_counter() - start
        return iterations[1:] or iterations, short  # the recorded first one is slower

    def _affordable_steps(self, short_s: float) -> int:
        most = max((loop.chunk_steps for loop in self._loops), default=_WARM_STEPS)
        # long enough for a line through both lengths; rows that end early do less and less towards the end
        parts = [-(-loop.chunk_steps // (4 if loop.typical_steps else 2)) for loop in self._loops]
        least = max(2 * _WARM_STEPS, *parts) if parts else most
        steps = _WARM_STEPS * self._budget_s * self._blocks[0] / max(sum(self._blocks) * short_s, 1e-9)
        return max(_WARM_STEPS, min(most, max(int(steps), min(least, int(_PATIENCE * steps)))))


def _repeats(seconds: Sequence[float], budget_s: float, least: int) -> bool:
    """Returns whether another repetition fits into the budget while the mean of those after the first is uncertain."""
    number, all_s = len(seconds), sum(seconds) + seconds[-1]
    if number < least and all_s < _PATIENCE * budget_s:
        return True
    return all_s < budget_s and (number < _REPETITIONS or _vary(seconds[1:]))


def _vary(seconds: Sequence[float]) -> bool:
    return statistics.stdev(seconds) > _UNCERTAIN * statistics.mean(seconds) * len(seconds) ** 0.5
