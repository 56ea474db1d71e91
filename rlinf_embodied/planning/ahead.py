"""Simulates plans with a staleness of k, whose fronts run ahead: several iterations, up to the steady state.

Workflow.back() returns the stages that learn and those downstream of them; the other stages are the front.

    run 0    front 0 ... front k    back 0    weights 0
    run i    front i+k              back i    weights i

A worker executes its calls in the order of their submission, so weights i are installed after front i + k: front j
uses the weights of back j - k - 1.  If front and back share no worker, the back is submitted first.  Run i ends when
front i, back i and weights i have ended.  Run i + 1 is submitted only then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlinf_embodied.planning.calls import Simulation
from rlinf_embodied.planning.plan import Plan, Step, schedule

if TYPE_CHECKING:
    from rlinf_embodied.planning.simulate import Simulator

MOST_RUNS = 24  # limit; if no steady state is reached by then, the mean of the later half counts
_SAME = 1e-9  # tolerance for equal times, as a fraction of a run's seconds


def steady(times: Simulator, plan: Plan, traced: bool = False) -> Simulation:
    """Returns the simulation of one iteration in the steady state of a plan; inf seconds if a stage cannot run.

    Spans are those of the last run, relative to its start.
    """
    runs = _Runs(times, plan, traced)
    ends: list[float] = []
    states: list[tuple[frozenset[tuple[str, int]], list[float]]] = []
    for number in range(MOST_RUNS):
        ends.append(runs.next())
        if not math.isfinite(ends[-1]):
            return runs.simulation(ends[-1])
        states.append(runs.state())
        (offloaded, clocks_s), same_s = states[-1], _SAME * ends[-1] / len(ends)
        for before in reversed(range(number)):
            both = zip(states[before][1], clocks_s, strict=True)
            if states[before][0] == offloaded and all(abs(a - b) <= same_s for a, b in both):
                return runs.simulation((ends[-1] - ends[before]) / (number - before))
    half = len(ends) // 2
    return runs.simulation((ends[-1] - ends[half - 1]) / (len(ends) - half))


class _Runs:
    """Successive runs of one plan; clocks and the fronts that were submitted ahead are carried over."""

    def __init__(self, times: Simulator, plan: Plan, traced: bool) -> None:
        self._times, self._traced = times, traced
        steps, back = schedule(plan.items, times.work), times.work.back()
        self._front = [step for step in steps if not back.intersection(step.stages)]
        self._back = [step for step in steps if back.intersection(step.stages)]
        self.clocks = times.clocks(plan)
        stages = ({stage for step in steps for stage in step.stages} for steps in (self._front, self._back))
        front, back = ({host for s in some for host in self.clocks.layouts[s].occupied} for some in stages)
        self._share = bool(front & back)
        self._ahead: deque[dict[str, list[float]]] = deque()
        self._begin_s = self._end_s = 0.0
        for _ in range(plan.staleness):
            self._submit_front()

    def next(self) -> float:
        clocks = self.clocks
        clocks.calls_s, clocks.other_s, clocks.submitted = {}, {}, 0
        clocks.spans = [] if self._traced else None
        if self._share:
            self._submit_front()
        clocks.ends = self._ahead.popleft()
        clocks.begin({stage for step in self._back for stage in step.stages})
        self._submit(self._back)
        last_s = clocks.last_s()
        if not self._share:
            self._submit_front()
        self._begin_s, self._end_s = self._end_s, max(last_s, self._times.send_weights(clocks))
        clocks.wait(self._end_s)
        return self._end_s

    def state(self) -> tuple[frozenset[tuple[str, int]], list[float]]:
        """Returns the offloaded stages, and all clocks and ends of calls ahead, relative to the end of the run."""
        ahead = [end for front in self._ahead for ends in front.values() for end in ends]
        return frozenset(self.clocks.offloaded), [time_s - self._end_s for time_s in (*self.clocks.free_s, *ahead)]

    def simulation(self, iteration_s: float) -> Simulation:
        simulation, begin_s = self.clocks.simulation(iteration_s), self._begin_s
        spans = (replace(s, start_s=s.start_s - begin_s, end_s=s.end_s - begin_s) for s in simulation.spans)
        return replace(simulation, spans=tuple(spans))

    def _submit_front(self) -> None:
        self.clocks.ends = {}
        self.clocks.begin({stage for step in self._front for stage in step.stages})
        self._submit(self._front)
        self._ahead.append(self.clocks.ends)

    def _submit(self, steps: Sequence[Step]) -> None:
        """Submits steps; after the last repeated one the driver waits for all calls that are submitted so far."""
        work = self._times.work
        repeated = work.repeated()
        for number, step in enumerate(steps):
            self._times.submit(step, self.clocks)
            later = steps[number + 1 :]
            if repeated.issuperset(step.stages) and not (later and repeated.issuperset(later[0].stages)):
                self.clocks.wait(self.clocks.last_s())
