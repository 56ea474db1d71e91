"""What a launch with plan=auto does before its first iteration, on emulated devices: the probes, and their profile."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from rlinf_embodied.config import PlanConfig
from rlinf_embodied.errors import WorkerError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import REPETITIONS, WARM_STEPS, affordable_steps, wanted_repetitions
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.probes import Measurements, Probe, Shown, probes, profile_of, shortened, switching
from rlinf_embodied.planning.profile import Profile, StageProfile
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.tools.emulated_stage import Finish, Start
from rlinf_embodied.tools.emulation import Emulator, emulated_workflow, time_scale
from rlinf_embodied.workflow.graph import Workflow


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe and the emulated seconds of its iterations."""

    name: str
    devices: int
    blocks_per_device: int
    chunk_steps: int
    seconds: float

    def row(self) -> dict[str, str]:
        """Returns its line of the table that is printed."""
        return {
            "probe": self.name,
            "devices": str(self.devices),
            "blocks per device": str(self.blocks_per_device),
            "chunk-steps": str(self.chunk_steps or "-"),
            "EMULATED s": f"{self.seconds:.1f}",
        }


def emulated_profile(
    pricer: Pricer, session: Session, budget_s: float = PlanConfig().profile_budget_s
) -> tuple[Profile, list[Probed]]:
    """Returns the profile that the probes of a launch measure on emulated devices, and what each of them took.

    Memory, switches and bytes are not emulated: they are those of the profile that the devices sleep by.

    Args:
        pricer: of the emulated devices.
        session: whose workers sleep.
        budget_s: see `profiler.measure`.
    """
    return _Launch(pricer, session, budget_s).run()


class _Launch:
    def __init__(self, pricer: Pricer, session: Session, budget_s: float) -> None:
        self._pricer, self._session, self._budget_s = pricer, session, budget_s
        self._planned = probes(pricer.workflow, pricer.cluster)
        self._measured = Measurements(pricer.workflow, weights=dict(pricer.profile.weights))
        self._measured.edge_bytes_per_item = dict(pricer.profile.edge_bytes_per_item)
        self._iteration, self._steps, self._is_slow = 0, 0, False

    def run(self) -> tuple[Profile, list[Probed]]:
        truth, found = self._pricer.profile, []
        for probe in self._planned:
            try:
                found.append(self._probed(probe))
            except WorkerError:  # a device does not hold all of its stages
                found.append(self._probed(switching(probe)))
        for stage, known in truth.stages.items():
            _copy_switches(self._measured.stages[stage], known)
        profile = profile_of(f"{truth.name} (EMULATED)", self._pricer.cluster, self._measured, truth.fingerprint)
        tails = {n: replace(s, finish_quantiles=truth.stages[n].finish_quantiles) for n, s in profile.stages.items()}
        return replace(profile, stages=tails, workload=truth.workload), found

    def _probed(self, probe: Probe) -> Probed:
        seconds = 0.0
        if not self._is_slow:
            ((_, seconds),) = self._iterate(probe, shortened(probe.workflow, WARM_STEPS), 1)
        if not self._steps:
            self._is_slow = seconds > self._budget_s
            self._steps = affordable_steps(self._pricer.workflow, self._planned, seconds, self._budget_s)
        run = shortened(probe.workflow, self._steps)
        share_s = self._budget_s * probe.most_blocks / sum(planned.most_blocks for planned in self._planned)
        ((spans, one_s),) = self._iterate(probe, run, 1)
        done = [(spans, one_s)]
        if wanted_repetitions(one_s / share_s) > 1:
            done += self._iterate(probe, run, REPETITIONS - 1)
        for spans, more_s in done:
            self._measured.add(probe, run, spans, {})
            seconds += more_s
        for stage, known in self._pricer.profile.stages.items():
            cell, shown = probe.cell(stage), self._measured.stages[stage]
            shown.resident[cell], shown.working[cell] = (float(at(*cell)) for at in (known.resident, known.working))
        steps = max((loop.chunk_steps for loop in run.loops.values()), default=0)
        self._measured.chunk_steps = max(1, steps)
        return Probed(probe.name, len(probe.plan.devices()), probe.most_blocks, steps, seconds)

    def _iterate(self, probe: Probe, run: Workflow, number: int) -> list[tuple[list[Span], float]]:
        """Returns the spans of some iterations of a shortened workflow, in emulated seconds, and their lengths."""
        pricer = Pricer(run, self._shortened(run), self._pricer.cluster)
        emulated = emulated_workflow(pricer, f"{probe.name} {uuid.uuid4().hex[:8]}")
        scale = time_scale(probe.plan, pricer, Emulator(pricer, self._session).predicted_s(probe.plan))
        self._session.clear()
        executor, clock_s, found = Executor(emulated, probe.plan, self._session, self._pricer.cluster), 0.0, []
        for _ in range(number):
            self._iteration += 1
            begin = Start(self._iteration, time.time(), scale, clock_s)
            result = executor.run(StepContext(self._iteration, message=begin))
            reports = [report for rounds in result.reports.values() for reports in rounds for report in reports]
            clock_s = max(finish.end_s for finish in of_type(reports, Finish))
            at = lambda wall_s, begin=begin: (wall_s - begin.wall_s) / scale  # noqa: E731
            spans = [replace(span, start_s=at(span.start_s), end_s=at(span.end_s)) for span in result.spans]
            found.append((spans, clock_s - begin.begin_s))
        return found

    def _shortened(self, run: Workflow) -> Profile:
        """Returns the profile of the devices with as much less work behind shortened loops."""
        whole, stages = self._pricer.workflow, dict(self._pricer.profile.stages)
        for name, loop in run.loops.items():
            for stage in run.downstream(*loop.sides):
                share = loop.chunk_steps / whole.loops[name].chunk_steps
                stages[stage] = replace(stages[stage], seconds=stages[stage].seconds * share)
        return replace(self._pricer.profile, stages=stages)


def _copy_switches(shown: Shown, known: StageProfile) -> None:
    shown.offloaded_bytes = None if known.stays else known.offloaded_bytes
    shown.offload_s, shown.onload_s, shown.cores = known.offload_s, known.onload_s, known.cores_per_device
