"""What a plan takes, call by call: the definition of its price.

The calls of schedule.py are gone through in the order in which the executor submits them.  A worker takes its calls in
that order, so that one pass suffices (call_times.py):

    start    of a call: when its device has done the calls before it, and the data of its blocks has arrived
    arrival  each device sends, and each receives, one block after the other; what stays in its worker is there at once
    switch   before a call, where a stage is in the device's memory that may not be there together with the called one
    loop     the same, chunk-step by chunk-step and shard by shard; one call per worker where both sides share workers
    weights  at the end, from one worker of the source to all of the target's that do not host both

Time starts at 0, when the iteration before has ended, in the state that it has left; of plans with a staleness several
iterations are gone through, see ahead.py.

tests/execution/test_emulation.py holds this against the real executor with stages that only keep time.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_embodied.planning.ahead import steady
from rlinf_embodied.planning.call_times import CallTimes
from rlinf_embodied.planning.clocks import Clocks, Simulation
from rlinf_embodied.planning.plan import Node, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.schedule import Step, schedule
from rlinf_embodied.telemetry.trace import Span


class Simulator(CallTimes):
    """Simulates plans of one workflow, profile and cluster; what many plans have in common is remembered."""

    def run(self, tree: Node, traced: bool = False, staleness: int = 0) -> Simulation:
        """Returns what happens in one iteration of a plan; it takes inf seconds where a stage cannot run."""
        plan = Plan("", self.pricer.cluster.num_devices, tree, staleness)
        if staleness:
            return steady(self, plan, traced)
        steps, exclusive = schedule(plan, self.work), plan.exclusive()
        clocks = self._iteration(plan, steps, exclusive, set(), None)
        if clocks.offloaded or traced:  # what the iteration before has left in memory
            clocks = self._iteration(plan, steps, exclusive, clocks.offloaded, [] if traced else None)
        return clocks.simulation(max(clocks.free_s))

    def _iteration(
        self,
        plan: Plan,
        steps: Sequence[Step],
        exclusive: dict[str, frozenset[str]],
        offloaded: set[tuple[str, int]],
        spans: list[Span] | None,
    ) -> Clocks:
        clocks = Clocks([0.0] * plan.num_devices, self.layouts(steps), set(offloaded), spans)
        clocks.begin(clocks.layouts)
        self.submit(steps, exclusive, clocks)
        self.send_weights(exclusive, clocks)
        return clocks


def simulate(tree: Node, pricer: Pricer, traced: bool = True, staleness: int = 0) -> Simulation:
    """Returns what happens in one iteration of a plan, with a span for every call if `traced`."""
    return Simulator(pricer).run(tree, traced, staleness)
