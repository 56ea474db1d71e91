"""Why a plan is as fast as it is: what binds it, who idles, what it holds, and why it lost to a faster one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Leaf, Plan
from rlinf_embodied.planning.planner import WORTH, Found, Mode, by_choice, find_plans, label
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate

LONG_COLUMNS = ("plan", "devices", "why not")  # of `rows`: they need lines of their own


@dataclass(frozen=True, slots=True)
class Ranked:
    """A plan as it is reported."""

    plan: Plan
    shape: str
    iteration_s: float
    devices: dict[str, int]  # of each stage
    busy_s: dict[str, float]  # of each stage, on its busiest device
    bottleneck: str
    idle_share: float  # mean over devices
    worst_idle_share: float
    peak_bytes: float
    why_not: str = ""  # why it lost; empty for the best

    @property
    def label(self) -> str:
        """Its shape and, where it has one, its staleness."""
        return label(self.shape, self.plan.staleness)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A mode without any plan, and the reason."""

    mode: Mode
    reason: str


def rank(
    pricer: Pricer, num_ranked: int = 8, *, min_staleness: int = 0, max_staleness: int = 0
) -> tuple[list[Ranked], list[Infeasible]]:
    """Returns the best plans of all kinds, the best of every mode among them, and the modes that are impossible.

    The first plan is the one to choose.  Modes are of plans without staleness.

    Raises:
        PlanError: no plan is possible at all; says what is short.
    """
    found = find_plans(pricer, min_staleness=min_staleness, max_staleness=max_staleness)
    plans = {plan.label: plan for plan in found[:num_ranked]}
    impossible = []
    for mode in (Mode.temporal, Mode.spatial, Mode.hybrid) if not min_staleness else ():
        try:
            best = find_plans(pricer, mode)[0]
        except PlanError as error:
            impossible.append(Infeasible(mode, str(error)))
            continue
        plans.setdefault(best.label, best)
    ordered = by_choice(plans.values())
    ranked = [describe(pricer, found, f"{pricer.workflow.name}_{i + 1}") for i, found in enumerate(ordered)]
    return [_compared(entry, ranked[0]) for entry in ranked], impossible


def describe(pricer: Pricer, found: Found, name: str) -> Ranked:
    """Returns a found plan with everything that a report says of it."""
    plan = Plan(name, pricer.cluster.num_devices, found.tree, found.staleness)
    run = simulate(found.tree, pricer, traced=False, staleness=found.staleness)
    devices = {stage: len(leaf.devices) for stage, leaf in plan.leaves().items()}
    busy = run.stages_s
    idle = [max(0.0, run.idle_share(device)) for device in range(pricer.cluster.num_devices)]
    return Ranked(
        plan=plan,
        shape=found.shape,
        iteration_s=found.iteration_s,
        devices=devices,
        busy_s=busy,
        bottleneck=max(busy, key=lambda stage: busy[stage]),
        idle_share=sum(idle) / len(idle),
        worst_idle_share=max(idle),
        peak_bytes=found.peak_bytes,
    )


def _compared(entry: Ranked, best: Ranked) -> Ranked:
    """Returns the entry with the reason why it is slower than the best."""
    if entry is best:
        return entry
    if entry.iteration_s < best.iteration_s * (1 - 1e-6):
        saved = 1 - entry.iteration_s / best.iteration_s
        why = f"saves {saved:.1%}, but a larger staleness has to save {WORTH:.0%} of the best with a smaller one"
        return Ranked(**{**_as_dict(entry), "why_not": why})
    if entry.iteration_s <= best.iteration_s * (1 + 1e-6):
        return Ranked(**{**_as_dict(entry), "why_not": "as fast as the best"})
    slower = {stage: entry.busy_s[stage] - best.busy_s[stage] for stage in entry.busy_s}
    stage = max(slower, key=lambda s: slower[s])
    lost = entry.iteration_s - best.iteration_s
    reasons = [f"+{lost:.3g} s ({lost / best.iteration_s:.0%})"]
    if slower[stage] > 0.01 * best.iteration_s:
        reasons.append(
            f"{stage} computes {entry.busy_s[stage]:.3g} s on {entry.devices[stage]} devices, "
            f"{best.busy_s[stage]:.3g} s on {best.devices[stage]} in the best plan"
        )
    if entry.idle_share > best.idle_share + 0.01:
        reasons.append(f"devices idle {entry.idle_share:.0%} of the time, {best.idle_share:.0%} in the best plan")
    if len(reasons) == 1:
        reasons.append("its switches and transfers take longer")
    return Ranked(**{**_as_dict(entry), "why_not": "; ".join(reasons)})


def _as_dict(entry: Ranked) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Ranked.__dataclass_fields__}


def _placed(leaf: Leaf) -> str:
    """Returns a stage with its number of devices, and the blocks of each where they are given: "env 2 (5:3)"."""
    shares = f" ({':'.join(map(str, leaf.shares))})" if leaf.shares else ""
    return f"{leaf.stage} {len(leaf.devices)}{shares}"


def rows(ranked: Sequence[Ranked]) -> list[dict[str, str]]:
    """Returns the table that is printed: one row per plan, one text per column; staleness where any plan has one."""
    stale = any(entry.plan.staleness for entry in ranked)
    return [
        {
            "plan": entry.shape,
            **({"staleness": str(entry.plan.staleness)} if stale else {}),
            "devices": " ".join(_placed(leaf) for leaf in entry.plan.leaves().values()),
            "s/iteration": f"{entry.iteration_s:.2f}",
            "bottleneck": f"{entry.bottleneck} {entry.busy_s[entry.bottleneck]:.1f} s",
            "idle (worst)": f"{entry.idle_share:.0%} ({entry.worst_idle_share:.0%})",
            "memory": f"{entry.peak_bytes / 1e9:.1f} GB",
            "why not": entry.why_not or "the best",
        }
        for entry in ranked
    ]
