"""CPU seconds of planning: published workloads on clusters of every size, and workflows of unusual shapes.

python -m experiments.bench.planner.seconds [profiles=maniskill_openvla,ppo_llm] [sizes=8,64,1024,4096]

Above 64 devices the number of blocks grows with that of devices.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.bench.harness import Benchmark, Report, Run, Table, names_of
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import ProfiledConfig
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import FORMAT, parse_profile, workflow_for
from rlinf_embodied.tools.plans import find_cluster, find_profile
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow

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


def shaped(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> Pricer:
    """Returns stages of a few seconds per block on four devices."""
    specs = {name: StageSpec(name, f"shaped.{name}", None) for name in names}
    work = Workflow("shaped", 8, specs, tuple(Edge(*ends, whole=False) for ends in edges))
    entries = {
        name: {
            "items_per_device": [1, 2],
            "devices": [1],
            "s_per_call": [[0.5 * (i % 3) + k * (1.0 + i % 2)] for k in (1, 2)],
        }
        for i, name in enumerate(names)
    }
    profile = parse_profile({"format": FORMAT, "name": "shaped", "device_kind": "h100", "stages": entries})
    return Pricer(work, profile, h100(4))


def shapes() -> dict[str, Pricer]:
    """Returns a long chain, many parallel stages, and stages between a first and a last one."""
    names = [f"s{i}" for i in range(40)]
    diamond = [edge for name in names[1:7] for edge in (("s0", name), (name, "s7"))]
    return {
        "chain of 40": shaped(names, list(itertools.pairwise(names))),
        "12 parallel": shaped(names[:12], []),
        "diamond of 8": shaped(names[:8], diamond),
    }


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
    other = Table(["workflow", "4 devices"], [[name, cpu_s(pricer)] for name, pricer in shapes().items()])
    return Report(
        content={"published": rows, "shapes": other.rows},
        text=f"{table}\n{other}",
        markdown=f"{table.markdown()}\n\n{other.markdown()}",
    )


BENCHMARK = Benchmark("planner.seconds", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
