"""CPU seconds of planning: published workloads on clusters of every size.

python -m experiments.bench.planner.seconds [profiles=maniskill_openvla,ppo_llm] [sizes=8,64,1024,4096]

Above 64 devices the number of blocks grows with that of devices.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from experiments.bench.harness import Benchmark, Report, Run, Table, names_of
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import ProfiledConfig
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.tools.plans import find_cluster, find_profile

_SAME_WORK = 64  # devices, up to which the work is that of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    profiles: str = "maniskill_openvla,ppo_llm"
    sizes: str = "8,64,1024,4096"
    out: str = ""


def h100(num_devices: int) -> Cluster:
    """Returns as many nodes of eight H100s as it takes, each as configs/cluster describes it."""
    one = find_cluster("h100x8")
    node = replace(one.groups[0], num_nodes=-(-num_devices // 8), devices_per_node=min(num_devices, 8))
    return replace(one, name=f"h100x{num_devices}", num_devices=num_devices, groups=(node,))


def cpu_s(pricer: Pricer) -> str:
    """Returns the CPU seconds of one ranking."""
    start = time.process_time()
    rank(pricer, search_s=600.0)
    return f"{time.process_time() - start:.1f}"


def measure(run: Run[Options]) -> Report:
    """Ranks each once."""
    own, sizes, rows = run.options, [int(size) for size in run.options.sizes.split(",")], []
    for name in names_of(own.profiles):
        cells = []
        for size in sizes:
            profile = find_profile(ProfiledConfig(profile=name))
            assert profile.workload is not None
            items = profile.workload.num_items * max(1, size // _SAME_WORK)
            grown = replace(profile, workload=replace(profile.workload, num_items=items))
            cells.append(cpu_s(Pricer(workflow_for(grown), grown, h100(size))))
        rows.append([name, *cells])
    table = Table(["profile", *map(str, sizes)], rows)
    return Report(content={"published": rows}, text=str(table), markdown=table.markdown())


BENCHMARK = Benchmark("planner.seconds", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
