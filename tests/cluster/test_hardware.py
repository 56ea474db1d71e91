"""What a machine offers, as plain values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlinf_embodied.cluster import hardware
from rlinf_embodied.cluster.hardware import WAITING, Cluster, NodeGroup, cluster_at_hand, local_cluster
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.tools.plans import described_cluster


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that gives this machine GPUs (what the driver's tool prints) and cores."""

    def make(gpus: str, cores: int = 4, visible: str | None = None) -> None:
        monkeypatch.setattr(hardware.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpus else None)
        lines = "".join(f"{name}, {size}\n" for name, size in zip(gpus.splitlines(), (143771, 81559), strict=False))
        answer = SimpleNamespace(returncode=0, stdout=lines)
        monkeypatch.setattr(hardware.subprocess, "run", lambda command, **options: answer)
        monkeypatch.setattr(hardware, "num_cores", lambda: cores)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_without_a_gpu_a_device_is_a_core(machine) -> None:
    machine("", cores=6)
    cluster = local_cluster(None)
    assert (cluster.kind, cluster.num_devices, cluster.num_cores) == ("cpu", 6, 6)
    assert cluster.torch_device(5) == "cpu"
    assert local_cluster(2).num_devices == 2
    assert local_cluster(9).num_devices == 9  # more processes than cores are slow, not wrong


def test_gpus_are_the_devices_where_there_are_any(machine) -> None:
    machine("NVIDIA H200\nNVIDIA H200\n", cores=16)
    cluster = local_cluster(None)
    assert (cluster.kind, cluster.num_devices, cluster.num_cores) == ("cuda", 2, 16)
    assert cluster.torch_device(1) == "cuda:0"  # each worker sees its own only
    assert cluster.description == "2 x NVIDIA H200"
    assert cluster.memory_bytes == 81559 << 20  # of the smaller one, not this machine's
    with pytest.raises(ConfigError, match=r"cluster.num_devices is 3, but this machine has 2 visible NVIDIA GPU\(s\)"):
        local_cluster(3)


def test_the_kind_of_device_is_what_the_config_says(machine) -> None:
    machine("NVIDIA H200\n", cores=4)
    assert local_cluster(None, "cpu").kind == "cpu"
    assert local_cluster(None, "cuda").kind == "cuda"
    config = ClusterConfig(torch_device="npu", device_module="torch_npu", num_devices=2)
    cluster = cluster_at_hand(config)
    assert (cluster.kind, cluster.num_devices, cluster.device_module) == ("npu", 2, "torch_npu")
    assert [cluster.torch_device(k) for k in range(2)] == ["npu:0", "npu:1"]
    with pytest.raises(ConfigError, match=r"torch_device is 'npu', whose number of devices cannot be detected"):
        local_cluster(None, "npu")
    machine("", cores=4)
    with pytest.raises(ConfigError, match=r"cluster.torch_device is 'cuda', but this machine has 0 visible NVIDIA GPU"):
        local_cluster(None, "cuda")


def test_gpus_of_two_models_are_refused_until_those_of_one_are_chosen(machine) -> None:
    machine("NVIDIA H200\nRTX 4090\n")
    with pytest.raises(ConfigError, match=r"this machine has GPUs of 2 models \(NVIDIA H200, RTX 4090\).*CUDA_VISIBLE"):
        local_cluster(None)
    machine("NVIDIA H200\nRTX 4090\n", visible="1")
    assert (local_cluster(None).description, local_cluster(None).memory_bytes) == ("1 x RTX 4090", 81559 << 20)


@pytest.mark.parametrize(("visible", "number"), [("0", 1), ("1,0", 2), ("", 0)])
def test_hidden_gpus_do_not_count(machine, visible: str, number: int) -> None:
    machine("NVIDIA H200\nNVIDIA H200\n", cores=3, visible=visible)
    cluster = local_cluster(None)
    assert (cluster.kind, cluster.num_devices) == (("cuda", number) if number else ("cpu", 3))


def nodes(kind: str, num_nodes: int, devices: int, memory_bytes: float) -> NodeGroup:
    return NodeGroup(
        kind=kind, num_nodes=num_nodes, devices_per_node=devices, memory_bytes=memory_bytes, cores_per_node=8
    )


def test_devices_are_numbered_group_after_group_and_node_after_node() -> None:
    groups = (nodes("h100", 2, 2, 80e9), nodes("cpu", 1, 3, 8e9))
    cluster = Cluster("mixed", "h100+cpu", 7, 24, 0, groups=groups)
    assert cluster.group_devices() == (range(4), range(4, 7))
    places = [cluster.place_of(device) for device in range(7)]
    assert [(place.node, place.index) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert [place.group.memory_bytes for place in places] == [80e9] * 4 + [8e9] * 3
    for device in (-1, 7):
        with pytest.raises(AssertionError, match=f"device {device} lies beyond the 7 devices of cluster mixed"):
            cluster.place_of(device)


@pytest.mark.parametrize(("memory", "free", "expected"), [(100, 1000, 30.0), (100, 20, 18.0), (0.5, 1000, 0.25)])
def test_the_object_store_takes_a_share_of_the_machine(
    monkeypatch, memory: float, free: float, expected: float
) -> None:
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: int(memory * 2**30))
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * 2**30))
    assert hardware.store_bytes() == pytest.approx(expected * 2**30)


def test_a_control_group_limits_the_memory_of_the_host(tmp_path, monkeypatch) -> None:
    whole = hardware.host_memory_bytes()
    for said, expected in (("max\n", whole), ("1048576\n", 1 << 20), (f"{whole * 2}\n", whole)):
        (tmp_path / "memory.max").write_text(said)
        monkeypatch.setattr(hardware, "_MEMORY_LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
        assert hardware.host_memory_bytes() == expected


def test_workers_that_wait_lie_beside_the_cores_of_the_first_node(machine) -> None:
    machine("", cores=3)
    found = cluster_at_hand(ClusterConfig(num_devices=2, waiting_devices=2))
    assert (found.num_devices, found.num_computing, found.kind) == (4, 2, "cpu")
    assert [found.place_of(device).node for device in range(4)] == [0] * 4
    assert [found.place_of(device).group.kind for device in range(4)] == ["cpu", "cpu", WAITING, WAITING]
    assert [found.torch_device(device) for device in range(4)] == ["cpu"] * 4


def test_cores_beside_gpus_come_behind_them_and_before_workers_that_wait(machine) -> None:
    machine("NVIDIA H100")
    found = cluster_at_hand(ClusterConfig(cpu_devices=2, waiting_devices=1))
    assert (found.num_devices, found.num_computing, found.cores_beside) == (4, 1, (1, 2))
    assert [found.torch_device(device) for device in range(4)] == ["cuda:0", "cpu", "cpu", "cpu"]
    assert {found.place_of(device).node for device in range(4)} == {0}
    with pytest.raises(ConfigError, match="cpu_devices is 5, but a node has 4 cores"):
        cluster_at_hand(ClusterConfig(cpu_devices=5))


def test_devices_beside_others_share_their_nodes() -> None:
    beside = NodeGroup(kind="cpu", num_nodes=2, devices_per_node=3, memory_bytes=8e9, cores_per_node=3, beside=0)
    groups = (nodes("h100", 2, 2, 80e9), beside, nodes("rtx4090", 1, 1, 24e9))
    cluster = Cluster("mixed", "h100+cpu", 11, 24, 0, groups=groups)
    assert [cluster.place_of(device).node for device in range(11)] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("beside", "num_nodes"), [(1, 2), (-1, 2), (0, 3)])
def test_devices_lie_beside_an_earlier_group_of_as_many_nodes(beside, num_nodes) -> None:
    first = {"kind": "h100", "num_nodes": 2, "devices_per_node": 2, "memory_bytes": 8e10, "cores_per_node": 8}
    cores = {"kind": "cpu", "num_nodes": num_nodes, "devices_per_node": 4, "memory_bytes": 8e9, "cores_per_node": 4}
    found = described_cluster({"name": "x", "nodes": [first, cores | {"num_nodes": 2, "beside": 0}]}, "file")
    assert [found.place_of(device).node for device in (0, 2, 4, 8)] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"file.nodes\[1\].beside is .*an earlier group"):
        described_cluster({"name": "x", "nodes": [first, cores | {"beside": beside}]}, "file")


def test_a_device_has_the_memory_that_is_said_of_it() -> None:
    cores = cluster_at_hand(ClusterConfig(num_devices=2, torch_device="cpu", device_memory_bytes=10**9))
    assert [group.memory_bytes for group in cores.node_groups()] == [10**9]
    devices = cluster_at_hand(ClusterConfig(num_devices=2, torch_device="npu", device_memory_bytes=10**9))
    assert [group.memory_bytes for group in devices.node_groups()] == [10**9]
    with pytest.raises(ConfigError, match=r"cluster\.device_memory_bytes is 0, but it must be positive"):
        ClusterConfig(device_memory_bytes=0)


def test_a_gpu_that_shares_the_hosts_memory_has_as_much(machine, monkeypatch) -> None:
    machine("NVIDIA GB10")
    answer = SimpleNamespace(returncode=0, stdout="NVIDIA GB10, [N/A]\n")
    monkeypatch.setattr(hardware.subprocess, "run", lambda command, **options: answer)
    assert hardware.gpus() == [("NVIDIA GB10", hardware.host_memory_bytes())]


def test_a_config_says_what_its_wire_carries() -> None:
    found = cluster_at_hand(ClusterConfig(num_devices=2, torch_device="cpu", links={"latency_s": 0.002}))
    assert (found.links.latency_s, found.links.submit_s) == (0.002, hardware.Links().submit_s)
    with pytest.raises(ConfigError, match=r"cluster.links is .*its keys are across_nodes_bytes_per_s, latency_s"):
        ClusterConfig(links={"bytes_per_s": 1.0})
