"""What a launch with plan=auto does before its first iteration, on emulated devices: the probes, and their profile."""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.config import PlanConfig
from rlinf_embodied.errors import WorkerError
from rlinf_embodied.execution.profiler import Effort
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.probes import Iteration, Measurements, Probe, probes, profile_of, sample, switching
from rlinf_embodied.planning.profile import Profile
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.tools.emulation import iterations, time_scale
from rlinf_embodied.workflow.graph import Workflow


class EmulatedLaunch:
    """Measures the profile that the probes of a launch measure on emulated devices.

    Memory, switches and bytes are not emulated: they are those of the profile that the devices sleep by.
    """

    def __init__(self, pricer: Pricer, session: Session, budget_s: float = PlanConfig().profile_budget_s) -> None:
        self._pricer, self._session = pricer, session
        self._planned = probes(pricer.workflow, pricer.cluster)
        self._effort = Effort(pricer.workflow, self._planned, budget_s)
        self._measured = Measurements(pricer.workflow, weights=dict(pricer.profile.weights))
        self._measured.edge_bytes_per_item = dict(pricer.profile.edge_bytes_per_item)
        self.probe_s: dict[str, float] = {}  # emulated seconds that each probe took

    def run(self) -> Profile:
        truth, measured = self._pricer.profile, self._measured
        for probe in self._planned:
            for tried in (probe, switching(probe)):  # where a device does not hold all of its stages, or even one
                try:
                    self._run(tried)
                    break
                except WorkerError:
                    if tried is not probe and probe is self._planned[0]:
                        raise
        for stage, known in truth.stages.items():
            shown = measured.stages[stage]
            shown.offloaded_bytes = None if known.stays else known.offloaded_bytes
            shown.offload_s, shown.onload_s, shown.cores = known.offload_s, known.onload_s, known.cores_per_device
        profile = profile_of(f"{truth.name} (EMULATED)", self._pricer.cluster, measured, truth.fingerprint)
        tails = {n: replace(s, finish_quantiles=truth.stages[n].finish_quantiles) for n, s in profile.stages.items()}
        return replace(profile, stages=tails, workload=truth.workload)

    def _run(self, probe: Probe) -> None:
        done: list[Iteration] = []
        found = self._effort.measure(probe, lambda run, *_: done.append(self._iterate(probe, run)) or done[-1])
        for one in found.iterations:
            self._measured.add(probe, sample(probe, self._pricer.workflow, one))  # in proportion, see _iterate
        for stage, known in self._pricer.profile.stages.items():
            cell, shown = probe.cell(stage), self._measured.stages[stage]
            shown.resident[cell], shown.working[cell] = (at(*cell) for at in (known.resident, known.working))
        steps = [loop.chunk_steps for one in done[-1:] for loop in one.run.loops.values()]
        self._measured.chunk_steps = max(steps, default=1)
        self.probe_s[probe.name] = sum(one.seconds for one in done)

    def _iterate(self, probe: Probe, run: Workflow) -> Iteration:
        """Returns an iteration of a shortened workflow, in emulated seconds, with as much less work behind loops."""
        whole, stages = self._pricer.workflow, dict(self._pricer.profile.stages)
        for name, loop in run.loops.items():
            for stage in run.downstream(*loop.sides):
                share = loop.chunk_steps / whole.loops[name].chunk_steps
                stages[stage] = replace(stages[stage], seconds=stages[stage].seconds * share)
        pricer = Pricer(run, replace(self._pricer.profile, stages=stages), self._pricer.cluster)
        scale = time_scale(pricer, probe.plan)
        (done,) = iterations(pricer, self._session, probe.plan, [scale])
        at = lambda wall_s: (wall_s - done.begin.wall_s) / scale  # noqa: E731
        spans = [replace(span, start_s=at(span.start_s), end_s=at(span.end_s)) for span in done.spans]
        return Iteration(run, spans, done.end_s)
