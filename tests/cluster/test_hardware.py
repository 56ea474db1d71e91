"""What a machine offers, as plain values."""

from __future__ import annotations

import os

import pytest

from rlinf_embodied.cluster import hardware
from rlinf_embodied.cluster.hardware import cluster_at_hand, local_cluster
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that gives this machine GPUs (what the driver's tool prints) and cores."""

    def make(gpus: str, cores: int = 4, visible: str | None = None) -> None:
        monkeypatch.setattr(hardware.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpus else None)
        answer = type("Answer", (), {"returncode": 0, "stdout": gpus})
        monkeypatch.setattr(hardware.subprocess, "run", lambda *arguments, **options: answer)
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
    with pytest.raises(ConfigError, match=r"cluster.num_devices is 3, but this machine has 2 GPU\(s\)"):
        local_cluster(3)


@pytest.mark.parametrize(("visible", "number"), [("0", 1), ("1,0", 2), ("", 0)])
def test_hidden_gpus_do_not_count(machine, visible: str, number: int) -> None:
    machine("NVIDIA H200\nNVIDIA H200\n", cores=3, visible=visible)
    cluster = local_cluster(None)
    assert (cluster.kind, cluster.num_devices) == (("cuda", number) if number else ("cpu", 3))


def test_cores_are_those_that_this_process_may_use() -> None:
    assert hardware.num_cores() == len(os.sched_getaffinity(0))


def test_a_run_on_a_described_cluster_is_refused_and_sent_to_the_planner() -> None:
    with pytest.raises(ConfigError, match=r"experiments/plan.py cluster=h100x8.*experiments/emulate.py cluster=h100x8"):
        cluster_at_hand(ClusterConfig(name="emulated_h100x8", emulated=True))
