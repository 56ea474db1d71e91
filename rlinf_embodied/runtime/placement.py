"""Where Ray runs the workers of a plan: on the node of their device, with its cores or GPUs held for them.

    workers of a plan -> one bundle per node (all of its workers' devices) -> a placement group, all or nothing

On a cluster of this machine alone nothing is held: the plan knows what there is, and Ray would only hold back workers
beyond its count of cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlinf_embodied.cluster.hardware import RAY_GPUS
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import PlanError
from rlinf_embodied.runtime.host import WorkerSpec

_NODE_LABEL = "ray.io/node-id"
_RESERVE_S = 30.0


class Placement:
    """The places of a session's workers; they are held until `release`."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._options: dict[int, dict[str, object]] = {}

    def reserve(self, workers: Sequence[WorkerSpec]) -> None:
        """Holds the devices of new workers, all of them or none.

        Raises:
            PlanError: a node has too little left; says which, and what it would have to have.
        """
        placed = [spec for spec in workers if spec.node is not None and spec.worker not in self._options]
        if not placed:
            return
        bundles = bundles_of(placed)
        nodes = list(bundles)
        selectors = [{_NODE_LABEL: node} for node in nodes]
        group = placement_group(list(bundles.values()), strategy="PACK", bundle_label_selector=selectors)
        if not group.wait(_RESERVE_S):
            remove_placement_group(group)
            raise PlanError(_too_little(bundles))
        self._groups.append(group)
        for spec in placed:
            where = PlacementGroupSchedulingStrategy(group, nodes.index(str(spec.node)))
            self._options[spec.worker] = {**_resources(spec), "scheduling_strategy": where}

    def options(self, spec: WorkerSpec) -> dict[str, object]:
        """Returns how Ray is asked for a worker's process, also for one that takes the place of a lost one."""
        if spec.worker in self._options:
            return self._options[spec.worker]
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {**_resources(spec), "num_cpus": 0, "scheduling_strategy": here}

    def release(self) -> None:
        """Gives everything back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self._options = [], {}


def _resources(spec: WorkerSpec) -> dict[str, int]:
    on_gpu = kind_of(spec.device) in RAY_GPUS
    return {"num_cpus": int(not on_gpu), "num_gpus": int(on_gpu)}


def bundles_of(workers: Sequence[WorkerSpec]) -> dict[str, dict[str, float]]:
    """Returns what the workers of each node need of it, by node id: {"4f...": {"CPU": 2.0}}."""
    found: dict[str, dict[str, float]] = {}
    for spec in workers:
        bundle = found.setdefault(str(spec.node), {})
        name = "GPU" if _resources(spec)["num_gpus"] else "CPU"
        bundle[name] = bundle.get(name, 0.0) + 1.0
    return found


def _too_little(bundles: Mapping[str, Mapping[str, float]]) -> str:
    known = {node["NodeID"]: node for node in ray.nodes()}
    lines = []
    for node_id, bundle in bundles.items():
        node = known.get(node_id, {})
        has = node.get("Resources", {}) if node.get("Alive") else {}
        needs = " and ".join(f"{number:.0f} of its {has.get(name, 0):.0f} {name}s" for name, number in bundle.items())
        lines.append(f"{node.get('NodeManagerAddress', node_id)} {needs}")
    return (
        f"cluster=ray: the plan needs {', '.join(lines)}, and within {_RESERVE_S:.0f} s not all of them were free: "
        "another run holds them (`ray status` shows it), or a node is gone; wait, or use cluster.num_devices=<fewer>"
    )
