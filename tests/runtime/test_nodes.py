"""Two nodes of a Ray cluster on one machine; experiments/checks/two_nodes.py runs the same where nothing is shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.host import WorkerSpec
from rlinf_embodied.runtime.placement import bundles_of
from rlinf_embodied.runtime.ray_nodes import _knock

TESTS = Path(__file__).resolve().parents[1]


def test_the_devices_of_a_node_are_held_together() -> None:
    workers = [WorkerSpec(0, "cpu", node="a"), WorkerSpec(1, "cpu", node="b"), WorkerSpec(2, "cpu", node="b")]
    assert bundles_of(workers) == {"a": {"CPU": 1.0}, "b": {"CPU": 2.0}}
    assert bundles_of([WorkerSpec(0, "cuda:0", node="a")]) == {"a": {"GPU": 1.0}}


def test_an_address_at_which_nobody_listens_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"cluster.address is '127.0.0.1:9', but nothing answers there .*ray start"):
        _knock("127.0.0.1:9")


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:70000"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.address is .*it is auto or host:port"):
        ClusterConfig(address=address)
    with pytest.raises(ConfigError, match=r"cluster.address is 'auto', but one process .*joins no Ray"):
        ClusterConfig(address="auto", session="serial")


@pytest.mark.ray
def test_workers_run_on_the_nodes_of_their_devices_which_are_held_for_them() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, str(TESTS / "two_node_session.py"), os.environ.get("RLINF_TEST_TIMEOUT_S", "60")]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=TESTS.parent, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["versions"] == [[0], [1]]
    assert found["real"] == found["planned"]
    assert len(set(found["planned"])) == 2
    assert found["routes"] == ["network"]
    assert "num_devices is 3, but the Ray cluster at" in found["too many"]
    assert "1 of its 1 CPUs, and within 1 s not all of them were free: another run holds them" in found["held"]


@pytest.mark.ray
@pytest.mark.skipif("RAY_ADDRESS" in os.environ, reason="the Ray of RAY_ADDRESS is not ours")
def test_a_ray_of_our_own_is_reached_from_this_machine_alone(ray_cluster) -> None:
    import ray

    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
