"""A cluster from what its nodes say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf_embodied.cluster.nodes import NodeFacts, RayNode, cluster_of, require_alike
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError

VERSIONS = {"torch": "2.9.0", "rlinf_embodied": "0123456789ab"}
RAY = ClusterConfig(name="ray", address="auto")


def node(name: str, cpus: int = 4, gpus: tuple[str, ...] = (), memory: int = 16 << 30, here: bool = False) -> RayNode:
    found = tuple((name, 80 << 30) for name in gpus)
    facts = NodeFacts(gpus=found, num_cores=cpus, memory_bytes=memory, versions=VERSIONS)
    return RayNode(node_id=name, address=name, num_cpus=cpus, num_gpus=len(gpus), is_here=here, facts=facts)


def test_cores_are_devices_and_the_driver_comes_first() -> None:
    cluster = cluster_of([node("10.0.0.1"), node("10.0.0.2", here=True), node("10.0.0.3", cpus=2)], RAY)
    assert (cluster.kind, cluster.num_devices, cluster.num_cores) == ("cpu", 10, 10)
    assert [cluster.node_id(k) for k in range(10)] == ["10.0.0.2"] * 4 + ["10.0.0.1"] * 4 + ["10.0.0.3"] * 2
    assert [(group.num_nodes, group.devices_per_node) for group in cluster.node_groups()] == [(2, 4), (1, 2)]
    assert cluster.place_of(9).group.memory_bytes == (16 << 30) / 2
    assert {cluster.torch_device(k) for k in range(10)} == {"cpu"}


def test_nodes_are_numbered_as_their_devices_are_where_alike_ones_lie_apart() -> None:
    unlike = [node("a", here=True), node("b", cpus=2), node("c")]  # c is like a, and goes beside it
    cluster = cluster_of(unlike, RAY)
    assert [cluster.node_id(k) for k in range(10)] == ["a"] * 4 + ["c"] * 4 + ["b"] * 2


def test_a_limit_takes_the_first_devices() -> None:
    nodes = [node("a", here=True), node("b")]
    cluster = cluster_of(nodes, replace(RAY, num_devices=5))
    assert [cluster.node_id(k) for k in range(5)] == ["a"] * 4 + ["b"]
    assert cluster_of(nodes, replace(RAY, num_devices=2)).nodes == ("a",)
    assert cluster_of(nodes, replace(RAY, num_devices=2)).place_of(1).group.memory_bytes == (16 << 30) / 4
    with pytest.raises(ConfigError, match=r"num_devices is 9, but the Ray cluster at auto has 8 devices .*a: 4, b: 4"):
        cluster_of(nodes, replace(RAY, num_devices=9))


def test_gpus_are_the_devices_where_any_node_has_one_each_kind_in_a_group() -> None:
    nodes = [node("a", here=True), node("b", gpus=("H100",) * 2), node("c", gpus=("RTX 4090",))]
    cluster = cluster_of(nodes, RAY)
    assert (cluster.kind, cluster.num_devices) == ("cuda", 3)
    assert [group.kind for group in cluster.node_groups()] == ["H100", "RTX 4090"]
    assert [cluster.torch_device(k) for k in range(3)] == ["cuda:0"] * 3  # each worker sees its own only
    assert cluster.place_of(0).group.memory_bytes == 80 << 30  # of the device, not of its host
    assert cluster.nodes == ("b", "c")
    assert cluster_of(nodes, replace(RAY, torch_device="cpu")).num_devices == 12
    with pytest.raises(ConfigError, match="on a Ray cluster only cpu and cuda are detected"):
        cluster_of(nodes, replace(RAY, torch_device="npu"))
    with pytest.raises(ConfigError, match=r"has 0 devices of the kind cuda \(a: 0\)"):
        cluster_of(nodes[:1], replace(RAY, torch_device="cuda"))


def test_nodes_are_alike_though_their_memory_differs() -> None:
    first, second = node("a", here=True), node("b", memory=15 << 30)
    (group,) = cluster_of([first, second], RAY).node_groups()
    assert (group.num_nodes, group.memory_bytes) == (2, (15 << 30) / 4)


def test_nodes_that_run_something_else_are_refused() -> None:
    require_alike([node("a"), node("b")], VERSIONS)
    other = {"torch": "2.8.0", "rlinf_embodied": "0123456789ab"}
    with pytest.raises(ConfigError, match=r"node a has torch 2.9.0, but the driver has 2.8.0: install the same there"):
        require_alike([node("a")], other)
    with pytest.raises(ConfigError, match=r"node a has peft not at all, but the driver has 1\.0"):
        require_alike([node("a")], VERSIONS | {"peft": "1.0"})


def test_a_node_with_gpus_of_two_models_is_named() -> None:
    with pytest.raises(ConfigError, match=r"node b has GPUs of 2 models \(H100, RTX 4090\)"):
        cluster_of([node("a", here=True), node("b", gpus=("RTX 4090", "H100"))], RAY)


def test_cores_beside_gpus_are_devices_of_every_node() -> None:
    nodes = [node("a", gpus=("H100",), here=True), node("b", gpus=("H100",)), node("c", gpus=("RTX 4090",))]
    cluster = cluster_of(nodes, replace(RAY, cpu_devices=2))
    assert (cluster.kind, cluster.num_devices, cluster.num_computing) == ("cuda", 9, 3)
    assert cluster.cores_beside == tuple(range(3, 9))
    assert [cluster.node_id(k) for k in range(9)] == ["a", "b", "c", *"aabbcc"]
    assert [cluster.torch_device(k) for k in range(9)] == ["cuda:0"] * 3 + ["cpu"] * 6
    assert cluster.place_of(4).group.memory_bytes == (16 << 30) / 2
    with pytest.raises(ConfigError, match=r"cpu_devices is 5, but Ray has 4 cores of node a: .*--num-cpus=5"):
        cluster_of(nodes, replace(RAY, cpu_devices=5))
    with pytest.raises(ConfigError, match="it adds cores to nodes with accelerators, and there are none"):
        cluster_of([node("a", here=True)], replace(RAY, cpu_devices=2))
