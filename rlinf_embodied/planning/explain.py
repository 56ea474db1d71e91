"""Ranks the plans of a search, and explains why each is slower than the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.calls import Simulation
from rlinf_embodied.planning.check import check, never_ahead
from rlinf_embodied.planning.coarse import coarse
from rlinf_embodied.planning.notation import place_text, to_text
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.search import Search, State
from rlinf_embodied.planning.simulate import Simulator

LONG_COLUMNS = ("plan", "why not")  # of `rows`: they need separate lines
SEARCH_S = 10.0  # limit of a search
WORTH = 0.05  # a larger staleness must save this fraction of the best time with any smaller one
_SAME = 1e-6  # plans whose times differ by less, as a fraction of the best time, are equally fast
_KIND_BUDGET = 0.15  # of the moves of a search, for the best plan of one kind
_REFINED_BUDGET = 0.3  # of the moves of a search, for plans of units on the devices themselves


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its price."""

    plan: Plan
    kind: Kind
    iteration_s: float
    lacking_bytes: float  # 0 if it fits into memory


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan with the numbers that are reported."""

    plan: Plan
    kind: Kind
    run: Simulation
    idle_shares: tuple[float, ...]  # by device
    peak_bytes: float  # of any device
    why_not: str = ""  # why it lost; empty for the best

    @property
    def label(self) -> str:
        return to_text(self.plan)

    @property
    def iteration_s(self) -> float:
        return self.run.iteration_s

    @property
    def idle_share(self) -> float:
        """Mean over all devices."""
        return sum(self.idle_shares) / len(self.idle_shares)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The plans of a search, the best one first, and remarks to print below their table."""

    plans: tuple[Ranked, ...]
    remarks: tuple[str, ...]

    @property
    def best(self) -> Ranked:
        return self.plans[0]


def rank(
    pricer: Pricer, num_ranked: int = 8, *, min_staleness: int = 0, max_staleness: int = 0, search_s: float = SEARCH_S
) -> Ranking:
    """Returns the best plan of every kind, and the best ones of other structures.

    Raises:
        PlanError: no plan fits; the message names what is lacking.
    """
    _require_devices(pricer)
    until = time.monotonic() + search_s
    candidates, limited = [], False
    for staleness in range(min_staleness, max_staleness + 1):
        if staleness == 0 or not never_ahead(pricer.workflow):
            more, timed_out = _search(pricer, staleness, until)
            candidates, limited = candidates + more, limited or timed_out
    possible = [candidate for candidate in candidates if candidate.iteration_s < math.inf]
    if not possible:
        raise PlanError(_too_large(pricer, candidates))
    simulator, ranked = Simulator(pricer), list[Ranked]()
    for i, candidate in enumerate(_chosen(possible, num_ranked)):
        plan = replace(candidate.plan, name=f"{pricer.workflow.name}_{i + 1}")
        run, peak_bytes = simulator.run(plan), max(pricer.memory(plan).values())
        idle = tuple(max(0.0, run.idle_share(device)) for device in range(pricer.cluster.num_devices))
        ranked.append(Ranked(plan, candidate.kind, run, idle, peak_bytes))
    remarks = []
    for kind in Kind:
        lacking = [candidate.lacking_bytes for candidate in candidates if candidate.kind is kind]
        if not lacking or min(lacking) > 0:
            why = f"the best plan lacks {min(lacking) / 1e9:.2f} GB of memory" if lacking else "none"
            remarks.append(f"{kind}: {why}")
    if limited:
        remarks.append("the search ended at its time limit (plan.search_s), a longer one may find a faster plan")
    return Ranking(tuple(_compared(entry, ranked[0]) for entry in ranked), tuple(remarks))


def _search(pricer: Pricer, staleness: int, until: float) -> tuple[list[Candidate], bool]:
    """Returns the best plans of every kind and structure with a staleness, and whether the time limit ended it."""
    units = coarse(pricer)
    of = units.pricer if units else pricer
    search = Search(of, staleness)
    limited = search.run(until)
    for kind in Kind:
        limited = search.run(until, kind, _KIND_BUDGET) or limited
    candidates = _candidates(search)
    if units is None:
        return candidates, limited
    search, states = Search(pricer, staleness), list[State]()
    first = {candidate.kind: candidate for candidate in reversed(candidates)}
    few = {id(each): each for each in (*candidates[:3], *first.values())}  # simulating more would take too long
    for candidate in few.values():
        whole = units.expanded(candidate.plan, pricer)
        try:
            check(whole, pricer.workflow)
        except PlanError:
            continue
        states.append((whole.items, whole.exclusive))
    if states:
        limited |= search.run(until, budget=_REFINED_BUDGET, starts=states)
    return _candidates(search), limited


def _candidates(search: Search) -> list[Candidate]:
    entries = sorted(((score, kind, plan) for (kind, _), (score, plan) in search.best.items()), key=lambda e: e[0])
    return [Candidate(plan, kind, *score) for score, kind, plan in entries]


def _chosen(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """Returns the plan to choose, then others by their seconds, one of each structure, and the best of every kind.

    Staler rollouts slow learning down, so a larger staleness is chosen only if it saves WORTH.
    """
    best: Candidate | None = None
    for staleness in sorted({each.plan.staleness for each in candidates}):
        fastest = min((c for c in candidates if c.plan.staleness == staleness), key=lambda c: c.iteration_s)
        if best is None or fastest.iteration_s <= best.iteration_s * (1 - WORTH):
            best = fastest
    assert best is not None
    ordered = sorted(candidates, key=lambda c: (c is not best, c.iteration_s))
    first = {candidate.kind: candidate for candidate in reversed(ordered)}
    return ordered[:number] + [c for c in ordered[number:] if c is first[c.kind]]


def _compared(entry: Ranked, best: Ranked) -> Ranked:
    lost = entry.iteration_s - best.iteration_s
    if entry is best:
        why = ""
    elif lost < -_SAME * best.iteration_s:
        saved = 1 - entry.iteration_s / best.iteration_s
        why = f"saves {saved:.1%}, but a larger staleness has to save {WORTH:.0%} of the best with a smaller one"
    elif lost <= _SAME * best.iteration_s:
        why = "as fast as the best"
    else:
        best_costs = _costs(best)
        reasons = [
            f"{what} {seconds:.3g} s{where}, {best_costs[what][0]:.3g} s{best_costs[what][1]} in the best plan"
            for what, (seconds, where) in _costs(entry).items()
            if seconds - best_costs[what][0] > 0.01 * best.iteration_s
        ] or ["its calls wait longer for each other and for data"]
        why = f"+{lost:.3g} s ({lost / best.iteration_s:.0%}): {'; '.join(reasons)}"
    return replace(entry, why_not=why)


def _costs(entry: Ranked) -> dict[str, tuple[float, str]]:
    """Returns the seconds of all parts of an iteration, and the text of their devices."""
    run, places = entry.run, entry.plan.places()
    costs = {
        f"{s} computes": (n, f" on {place_text(places[s].devices, places[s].blocks)}") for s, n in run.stages_s.items()
    }
    costs |= {f"{what} take": (run.other_s.get(what, 0.0), "") for what in ("switches", "weights")}
    idle_s = entry.iteration_s * entry.idle_share
    return costs | {
        "submitting its calls takes": (run.driver_s, ""),
        "devices work on average": (entry.iteration_s - idle_s, ""),
        "devices idle on average": (idle_s, ""),
    }


def rows(ranked: Iterable[Ranked]) -> list[dict[str, str]]:
    """Returns the table that is printed: one row per plan, one text per column."""
    table = []
    for entry in ranked:
        busiest, seconds = max(entry.run.stages_s.items(), key=lambda stage: stage[1])
        table.append(
            {
                "plan": entry.label,
                "kind": str(entry.kind),
                "s/iteration": f"{entry.iteration_s:.2f}",
                "bottleneck": f"{busiest} {seconds:.1f} s",
                "idle (worst)": f"{entry.idle_share:.0%} ({max(entry.idle_shares):.0%})",
                "memory": f"{entry.peak_bytes / 1e9:.1f} GB",
                "why not": entry.why_not or "the best",
            }
        )
    return table


def _require_devices(pricer: Pricer) -> None:
    for stage, spec in pricer.workflow.stages.items():
        each = spec.devices_per_worker
        for group, devices in zip(pricer.groups, pricer.cluster.group_devices(), strict=True):
            if group.devices_per_node % each and pricer.slowdown_on(stage, devices.start) < math.inf:
                raise PlanError(
                    f"each worker of {stage} has {each} devices, but a node of {pricer.cluster.name} has "
                    f"{group.devices_per_node}, which is not a multiple of it: use a number that divides a node's"
                )
        if not any(pricer.runs_on(stage, device) for device in range(pricer.cluster.num_devices)):
            kinds = ", ".join(sorted({group.kind for group in pricer.groups}))
            raise PlanError(
                f"no plan of {pricer.workflow.name} runs on {pricer.cluster.name}: its devices ({kinds}) or their "
                f"cores do not suit {stage}, or the profile has no time for them: profile {stage} there"
            )


def _too_large(pricer: Pricer, candidates: Sequence[Candidate]) -> str:
    closest = min(candidates, key=lambda candidate: candidate.lacking_bytes).plan
    needs = pricer.memory(closest)
    device = max(needs, key=lambda d: needs[d] - pricer.memory_bytes[d])
    has, stages = pricer.memory_bytes[device], [s for s, p in closest.places().items() if device in p.devices]
    reserved = " next to evaluations" if has < pricer.groups[pricer.group_of[device]].memory_bytes else ""
    return (
        f"no plan of {pricer.workflow.name} fits into the memory of {pricer.cluster.name}: even {to_text(closest)} "
        f"needs {needs[device] / 1e9:.2f} GB for {', '.join(stages)} on device {device}, which has {has / 1e9:.2f} GB"
        f"{reserved}, {(needs[device] - has) / 1e9:.2f} GB short: use more or larger devices, less work or a smaller "
        "staleness"
    )
