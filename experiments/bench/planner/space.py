"""What stale rollouts and uneven shares are predicted to save: the best plans with and without them.

python -m experiments.bench.planner.space [clusters=h100x8,h100x64] [unlike=h100x8_unlike] [staleness=2] [out=<file>]

Profiles are those of configs/profiles.  "even" is the search without moves of shares.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from experiments.bench.harness import Benchmark, Report, Run, Table, names_of
from experiments.bench.planner.published import WINNERS, frozen
from rlinf_embodied.planning.planner import Search, draft_tree, find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.planning.refine import Refiner
from rlinf_embodied.planning.simulate import Simulator
from rlinf_embodied.tools.plan_inputs import find_cluster

SHARES = ("profile", "cluster", "even s", "any shares s", "any / even")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    clusters: str = "h100x8,h100x64"
    unlike: str = "h100x8_unlike"
    staleness: int = 2
    out: str = ""


def pricer_on(profile: str, cluster: str) -> Pricer:
    """Returns the prices of a profile's own workflow on a described cluster."""
    known = frozen(profile)
    return Pricer(workflow_for(known), known, find_cluster(cluster))


def by_staleness(profile: str, cluster: str, most: int) -> tuple[str, ...]:
    """Returns the seconds of the best plan for each staleness, and the one that is chosen."""
    plans = find_plans(pricer_on(profile, cluster), max_staleness=most)
    times = [[plan.iteration_s for plan in plans if plan.staleness == k] for k in range(most + 1)]
    return profile, cluster, *(f"{min(some):.2f}" if some else "-" for some in times), str(plans[0].staleness)


def by_shares(profile: str, cluster: str) -> tuple[str, ...]:
    """Returns the seconds of the best plan with even shares, and with any."""
    pricer = pricer_on(profile, cluster)
    trees = [draft_tree(draft, pricer) for draft in Search(pricer).run()]
    even_s, any_s = (Refiner(pricer, Simulator(pricer), uneven=u).best(trees)[0].iteration_s for u in (False, True))
    return profile, cluster, f"{even_s:.1f}", f"{any_s:.1f}", f"{any_s / even_s:.3f}"


def measure(run: Run[Options]) -> Report:
    """Plans everything; each table is shown as soon as it is there."""
    own, content = run.options, {}
    header = ("profile", "cluster", *(f"staleness {k} s" for k in range(own.staleness + 1)), "chosen")
    shared = (by_shares(name, cluster) for cluster in names_of(own.unlike) for name in WINNERS)
    stale = (by_staleness(name, cluster, own.staleness) for cluster in names_of(own.clusters) for name in WINNERS)
    for title, names, rows in (("shares", SHARES, shared), ("staleness", header, stale)):
        table = Table(names, list(rows))
        print(table.markdown(), end="\n\n", flush=True)
        content[title] = [dict(zip(names, row, strict=True)) for row in table.rows]
    return Report(content=content)


BENCHMARK = Benchmark("planner.space", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
