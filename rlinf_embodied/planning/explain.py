"""The plans that a search has found, ranked; why each is as fast as it is, and why it lost to the best one."""

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
WORTH = 0.05  # of the seconds of the best plan with a smaller staleness, that a plan with a larger one has to save
_SAME = 1e-6  # of the best plan's seconds: as fast
_KIND_BUDGET = 0.15  # of the moves of a search, for the best plan of one kind
_REFINED_BUDGET = 0.3  # of the moves of a search, for plans of units on the devices themselves


@dataclass(frozen=True, slots=True)
class Found:
    """A plan with its price; one that does not fit lacks some bytes."""

    plan: Plan
    kind: Kind
    iteration_s: float
    lacking_bytes: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan as it is reported."""

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
    """The plans of a search, the one to choose first, and what there is to print below their table."""

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
        PlanError: no plan is possible at all; says what is short.
    """
    _require_devices(pricer)
    until = time.monotonic() + search_s
    found, limited = [], False
    for staleness in range(min_staleness, max_staleness + 1):
        if staleness == 0 or not never_ahead(pricer.workflow):
            more, ended = _search(pricer, staleness, until)
            found, limited = found + more, limited or ended
    possible = [one for one in found if one.iteration_s < math.inf]
    if not possible:
        raise PlanError(_too_large(pricer, found))
    simulator, ranked = Simulator(pricer), list[Ranked]()
    for i, one in enumerate(_chosen(possible, num_ranked)):
        plan = replace(one.plan, name=f"{pricer.workflow.name}_{i + 1}")
        run, peak_bytes = simulator.run(plan), max(pricer.memory(plan).values())
        idle = tuple(max(0.0, run.idle_share(device)) for device in range(pricer.cluster.num_devices))
        ranked.append(Ranked(plan, one.kind, run, idle, peak_bytes))
    remarks = []
    for kind in Kind:
        lacking = [one.lacking_bytes for one in found if one.kind is kind]
        if not lacking or min(lacking) > 0:
            why = f"the best plan lacks {min(lacking) / 1e9:.2f} GB of memory" if lacking else "none"
            remarks.append(f"{kind}: {why}")
    if limited:
        remarks.append("the search ended at its time limit (plan.search_s), a longer one may find a faster plan")
    return Ranking(tuple(_compared(entry, ranked[0]) for entry in ranked), tuple(remarks))


def _search(pricer: Pricer, staleness: int, until: float) -> tuple[list[Found], bool]:
    """Returns the best plans of every kind and structure with a staleness, and whether the time limit ended it."""
    units = coarse(pricer)
    of = units.pricer if units else pricer
    search = Search(of, staleness)
    limited = search.run(until)
    for kind in Kind:
        limited = search.run(until, kind, _KIND_BUDGET) or limited
    found = _found(search)
    if units is None:
        return found, limited
    search, states = Search(pricer, staleness), list[State]()
    first = {one.kind: one for one in reversed(found)}
    for one in {id(one): one for one in (*found[:3], *first.values())}.values():  # as many as can be simulated
        whole = units.expanded(one.plan, pricer)
        try:
            check(whole, pricer.workflow)
        except PlanError:
            continue
        states.append((whole.items, whole.exclusive))
    if states:
        limited |= search.run(until, budget=_REFINED_BUDGET, starts=states)
    return _found(search), limited


def _found(search: Search) -> list[Found]:
    entries = sorted(((score, kind, plan) for (kind, _), (score, plan) in search.best.items()), key=lambda e: e[0])
    return [Found(plan, kind, *score) for score, kind, plan in entries]


def _chosen(found: Sequence[Found], number: int) -> list[Found]:
    """Returns the plan to choose, then others by their seconds, one of each structure, and the best of every kind.

    Staler rollouts cost learning: a larger staleness is chosen only where it saves a share of the best time with any
    smaller one.
    """
    best: Found | None = None
    for staleness in sorted({one.plan.staleness for one in found}):
        fastest = min((one for one in found if one.plan.staleness == staleness), key=lambda one: one.iteration_s)
        if best is None or fastest.iteration_s <= best.iteration_s * (1 - WORTH):
            best = fastest
    assert best is not None
    ordered = sorted(found, key=lambda one: (one is not best, one.iteration_s))
    first = {one.kind: one for one in reversed(ordered)}
    return ordered[:number] + [one for one in ordered[number:] if one is first[one.kind]]


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
        there = _costs(best)
        reasons = [
            f"{what} {seconds:.3g} s{where}, {there[what][0]:.3g} s{there[what][1]} in the best plan"
            for what, (seconds, where) in _costs(entry).items()
            if seconds - there[what][0] > 0.01 * best.iteration_s
        ] or ["its calls wait longer for each other and for data"]
        why = f"+{lost:.3g} s ({lost / best.iteration_s:.0%}): {'; '.join(reasons)}"
    return replace(entry, why_not=why)


def _costs(entry: Ranked) -> dict[str, tuple[float, str]]:
    """Returns the seconds of all parts of an iteration, and on which devices."""
    run, places = entry.run, entry.plan.places()
    found = {
        f"{s} computes": (n, f" on {place_text(places[s].devices, places[s].blocks)}") for s, n in run.stages_s.items()
    }
    found |= {f"{what} take": (run.other_s.get(what, 0.0), "") for what in ("switches", "weights")}
    idle_s = entry.iteration_s * entry.idle_share
    return found | {
        "submitting its calls takes": (run.driver_s, ""),
        "devices work on average": (entry.iteration_s - idle_s, ""),
        "devices idle on average": (idle_s, ""),
    }


def rows(ranked: Iterable[Ranked]) -> list[dict[str, str]]:
    """Returns the table that is printed: one row per plan, one text per column."""
    found = []
    for entry in ranked:
        busiest, seconds = max(entry.run.stages_s.items(), key=lambda stage: stage[1])
        found.append(
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
    return found


def _require_devices(pricer: Pricer) -> None:
    for stage in pricer.workflow.stages:
        if not any(pricer.runs_on(stage, device) for device in range(pricer.cluster.num_devices)):
            kinds = ", ".join(sorted({group.kind for group in pricer.groups}))
            raise PlanError(
                f"no plan of {pricer.workflow.name} runs on {pricer.cluster.name}: its devices ({kinds}) or their "
                f"cores do not suit {stage}, or the profile has no time for them: profile {stage} there"
            )


def _too_large(pricer: Pricer, found: Sequence[Found]) -> str:
    closest = min(found, key=lambda one: one.lacking_bytes).plan
    needs = pricer.memory(closest)
    device = max(needs, key=lambda d: needs[d] - pricer.memory_bytes[d])
    has, stages = pricer.memory_bytes[device], [s for s, p in closest.places().items() if device in p.devices]
    beside = " beside evaluations" if has < pricer.groups[pricer.group_of[device]].memory_bytes else ""
    return (
        f"no plan of {pricer.workflow.name} fits into the memory of {pricer.cluster.name}: even {to_text(closest)} "
        f"needs {needs[device] / 1e9:.2f} GB for {', '.join(stages)} on device {device}, which has {has / 1e9:.2f} GB"
        f"{beside}, {(needs[device] - has) / 1e9:.2f} GB short: use more or larger devices, less work or a smaller "
        "staleness"
    )
