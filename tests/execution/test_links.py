"""Which workers measure the links of a cluster."""

from __future__ import annotations

import pytest

from rlinf_embodied.cluster.hardware import Cluster, NodeGroup
from rlinf_embodied.execution.profiler import link_ends

NEAR, FAR = "within_node_bytes_per_s", "across_nodes_bytes_per_s"


@pytest.mark.parametrize(
    ("num_nodes", "devices", "num_blocks", "expected"),
    [
        (1, 1, 8, {}),
        (1, 4, 8, {NEAR: 1}),
        (2, 1, 8, {FAR: 1}),
        (2, 2, 8, {NEAR: 1, FAR: 2}),
        (2, 4, 3, {NEAR: 1}),  # the workers of the second node have no block, and do not run
    ],
)
def test_a_link_is_measured_between_workers_that_it_joins(
    num_nodes: int, devices: int, num_blocks: int, expected: dict[str, int]
) -> None:
    group = NodeGroup(
        kind="cpu", num_nodes=num_nodes, devices_per_node=devices, memory_bytes=1e9, cores_per_node=devices
    )
    cluster = Cluster("test", "cpu", group.num_devices, group.num_devices, 0, groups=(group,))
    assert link_ends(cluster, num_blocks) == expected
