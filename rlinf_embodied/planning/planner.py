"""Finds the best plan tree for a workflow on a cluster, and says why the others lost.

    1. units        a loop counts as one node; the rest is a graph without cycles (units.py)
    2. allocate     the sizes that a part of the cluster may have: every number of devices on small clusters, whole
                    nodes on large ones, per class of devices where it is mixed (allocations.py)
    3. alone        price every unit on every allocation: leaves; loops collocated, or disaggregated with every split
                    and shard count
    4. combine      sets of units in order of size, every cut in two: temporal (resident or switching) on one allocation
                    or spatial on every split of it, for every number of chunks; keep the undominated candidates
    5. build        the candidates for all units on the whole cluster become trees; on large clusters single nodes (and
                    devices) are moved between parts as long as that helps (improve.py)
    6. refine       on small clusters the best trees are changed one move at a time: stages on some of their part's
                    devices, unequal parts of turns, sides of a loop that overlap in part, idle devices (refine.py)
    7. rank         by simulated seconds per iteration; explain.py says what binds each plan and why it lost

With a staleness, the front of the workflow (what is not in Workflow.back()) runs ahead of its back: step 5 adds plans
that give each of them devices of its own, where the slower one counts, and steps 6 and 7 simulate several iterations.

The formulas of step 3 and 4 (cost.py) only tell which trees are worth simulating: they are bounds from above, but for
a few per cent.

Step 4 is a recursion over all differences of predecessor-closed sets: sub-plans of one set on one allocation are found
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.allocations import is_small
from rlinf_embodied.planning.draft import realize
from rlinf_embodied.planning.improve import Drafted
from rlinf_embodied.planning.plan import Leaf, LoopNode, Node, Spatial, leaves
from rlinf_embodied.planning.plan_check import require_staleness
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.probes import collocated
from rlinf_embodied.planning.refine import MOST_CALLS, Refiner
from rlinf_embodied.planning.search import LARGE_WIDTH, NUM_RANKED, SMALL_WIDTH, Mode, Search
from rlinf_embodied.planning.simulate import Simulator
from rlinf_embodied.workflow.graph import Workflow

__all__ = ["WORTH", "Found", "Mode", "Search", "by_choice", "draft_tree", "find_plans", "label", "ranked", "shape"]

LARGE_RANKED = 2  # plans that are returned on larger clusters, where a simulation takes a tenth of a second and more
WORTH = 0.05  # of the seconds of the best plan with a smaller staleness, that a plan with a larger one has to save
NUM_STALER = 2  # plans with each larger staleness that are returned


@dataclass(frozen=True, slots=True)
class Found:
    """A plan with its prediction."""

    tree: Node
    shape: str
    iteration_s: float
    peak_bytes: float  # on the fullest device
    staleness: int = 0

    @property
    def label(self) -> str:
        """Its shape and, where it has one, its staleness."""
        return label(self.shape, self.staleness)


def find_plans(
    pricer: Pricer, mode: Mode = Mode.any, width: int | None = None, *, min_staleness: int = 0, max_staleness: int = 0
) -> list[Found]:
    """Returns the feasible plans of a mode, at most one per shape and staleness: the best one, then the fastest.

    Args:
        pricer: what is to be planned.
        mode: which trees are tried.
        width: candidates that are kept per set of units and allocation; None: by the size of the cluster.
        min_staleness: the least staleness of any plan.
        max_staleness: the largest one, where the workflow has a part that can run ahead.

    Raises:
        PlanError: no plan fits into memory: says which comes closest, and what it lacks.
    """
    width = width or (SMALL_WIDTH if is_small(pricer.cluster.num_devices) else LARGE_WIDTH)
    search = Search(pricer, mode, width=width)
    drafts = search.run()
    stalenesses = [k for k in range(min_staleness, max_staleness + 1) if not k or runs_ahead(pricer.workflow)]
    plans = [found for k in stalenesses for found in ranked(drafts, pricer, mode, k, search.apart() if k else [])]
    if plans:
        return plans if len(stalenesses) == 1 else by_choice(plans)
    if drafts:
        raise PlanError(
            f"no plan of {pricer.workflow.name} with staleness {min_staleness} fits into the memory of "
            f"{pricer.cluster.name}, or its stages cannot run ahead: use a smaller staleness, which holds less data"
        )
    what = "plan" if mode is Mode.any else f"{mode} plan"
    smallest = Search(pricer, mode, width=width, ignore_memory=True).run()
    if not smallest:
        kinds = sorted({group.kind for group in pricer.classes})
        raise PlanError(
            f"no {what} of {pricer.workflow.name} runs on {pricer.cluster.name}: its devices ({', '.join(kinds)}) or "
            f"their cores do not suit the stages of profile {pricer.profile.name}, or they are "
            "too few: use another cluster"
        )
    if smallest[0].peak_bytes <= pricer.capacity_bytes:
        raise PlanError(
            f"no {what} of {pricer.workflow.name} on {pricer.cluster.name} is worth trying: taking turns on all "
            "devices is at least as good for every set of its stages: use plan=auto"
        )
    tree = draft_tree(smallest[0], pricer)
    needs = pricer.memory(tree)
    memory = {device: pricer.cluster.place_of(device).group.memory_bytes for device in needs}
    device = max(needs, key=lambda device: needs[device] / memory[device])
    needed, has = needs[device], memory[device]
    stages = ", ".join(leaf.stage for leaf in leaves(tree) if device in leaf.devices)
    raise PlanError(
        f"no {what} of {pricer.workflow.name} fits into the memory of {pricer.cluster.name}: even "
        f"{smallest[0].draft.shape()} needs {needed / 1e9:.2f} GB for {stages} on device {device}, which has "
        f"{has / 1e9:.2f} GB, {(needed - has) / 1e9:.2f} GB short: use devices with more memory, more of them, or less "
        "work"
    )


def ranked(
    drafts: list[Drafted], pricer: Pricer, mode: Mode, staleness: int = 0, apart: Sequence[Drafted] = ()
) -> list[Found]:
    """Step 6: the drafts as trees, and what refining makes of them; by simulated seconds, at most one per shape."""
    small = is_small(pricer.cluster.num_devices)
    most = NUM_RANKED if small else LARGE_RANKED
    refines = small and mode is Mode.any
    trees = [draft_tree(draft, pricer) for draft in (*apart[:most], *drafts[:most])]
    if refines and not trees:
        trees = [collocated(pricer.workflow, 1).tree]  # does not fit as it is, but perhaps some change of it does
    plans = Refiner(pricer, Simulator(pricer), staleness).best(trees, MOST_CALLS if refines else 0)
    found: dict[str, Found] = {}
    for plan in plans:
        text = shape(plan.tree)
        if text not in found and len(found) < NUM_RANKED:
            found[text] = Found(plan.tree, text, plan.iteration_s, plan.peak_bytes, staleness)
    return list(found.values())


def label(shape: str, staleness: int) -> str:
    """Returns what a plan is called: its shape and, where it has one, its staleness."""
    return f"{shape}, staleness {staleness}" if staleness else shape


def runs_ahead(workflow: Workflow) -> bool:
    """Returns whether a workflow has a part that can run ahead of what makes its weights."""
    try:
        require_staleness("", 1, workflow)
    except PlanError:
        return False
    return True


def by_choice(plans: Iterable[Found]) -> list[Found]:
    """Step 7: the plan to choose, then the others by their seconds.

    Staler rollouts cost learning: a larger staleness is chosen only where it saves a share of the best time with any
    smaller one, and its other plans are of interest only where they save anything.
    """
    kept: list[Found] = []
    best: Found | None = None
    ordered = sorted(plans, key=lambda found: found.iteration_s)
    for staleness in sorted({found.staleness for found in ordered}):
        least_s = min((found.iteration_s for found in kept), default=float("inf"))
        own = [found for found in ordered if found.staleness == staleness]
        if best is None or own[0].iteration_s <= least_s * (1 - WORTH):
            best = own[0]
        faster = [found for found in own if found.iteration_s < least_s][:NUM_STALER]
        kept += (faster or own[:1]) if kept else own
    return sorted(kept, key=lambda found: (found is not best, found.iteration_s))


def draft_tree(found: Drafted, pricer: Pricer) -> Node:
    """Returns a drafted plan on the cluster's devices, numbered class after class."""
    pools = tuple(tuple(devices) for devices in pricer.cluster.group_devices())
    return realize(found.draft, pools, pricer)


def shape(node: Node) -> str:
    """Returns a tree's structure without numbers of devices, for example "(rollout collocated > actor)"."""
    if isinstance(node, Leaf):
        return node.stage
    if isinstance(node, LoopNode):
        return f"{node.loop} {_apart(node)}"
    sign = " || " if isinstance(node, Spatial) else " > " if node.resident else " >> "
    return f"({sign.join(shape(part) for part in node.parts)})"


def _apart(node: LoopNode) -> str:
    """Returns how a loop's sides lie to each other; of more than two also which of them are together."""
    together: dict[frozenset[int], list[str]] = {}
    for leaf in node.stages:
        together.setdefault(frozenset(leaf.devices), []).append(leaf.stage)
    if len(together) == 1:
        return "collocated"
    alike = all(a.isdisjoint(b) for a, b in itertools.combinations(together, 2))
    apart = "disaggregated" if alike else "overlapping"
    return apart if len(node.stages) == 2 else f"{apart} {' | '.join('+'.join(names) for names in together.values())}"
