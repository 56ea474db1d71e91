"""Two nodes of a Ray cluster on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_embodied.cluster.hardware import Cluster, with_cores
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime import ray_cluster
from rlinf_embodied.runtime import session as sessions
from rlinf_embodied.runtime.ray_cluster import join

TESTS = Path(__file__).resolve().parents[1]


def test_an_address_at_which_nobody_listens_is_refused_at_once(monkeypatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"cluster.address is '127.0.0.1:9', but nothing answers there .*ray start"):
        join("127.0.0.1:9")


def test_a_machine_without_free_memory_for_ray_is_refused(monkeypatch) -> None:
    def init(**options: object) -> None:
        raise ValueError("the amount of memory on this node available for tasks and actors (-0.42 GB) is less than -1%")

    monkeypatch.setattr(ray_cluster, "_init", init)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"Ray cannot start with [\d.]+ GB of free memory: .* cluster=serial"):
        ray_cluster._start(None)


@pytest.mark.parametrize("address", ["head", "head:", ":6379"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.address is .*it is auto, or host:port"):
        ClusterConfig(address=address)
    with pytest.raises(ConfigError, match=r"cluster.address is 'auto', but it is auto, or host:port of a running Ray"):
        ClusterConfig(address="auto", session="serial")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder in place of /tmp/ray, so that neither this machine's other runs nor the test see each other's notes."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        yield Path(folder)


def _run(temporary: Path, *arguments: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    variables["RAY_TMPDIR"] = str(temporary)
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=TESTS.parent, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.ray
def test_a_run_on_this_machine_joins_no_cluster_that_is_noted_there(temporary: Path) -> None:
    note = temporary / "ray/ray_current_cluster"
    note.parent.mkdir()
    note.write_text("127.0.0.1:9")  # what a killed Ray leaves; nothing answers there
    start = "from rlinf_embodied.runtime.ray_cluster import begin_ray, start_ray; begin_ray(128 << 20); start_ray(); "
    asked = "import ray, signal; print(ray.get(ray.remote(lambda: 42).remote()), signal.getsignal(signal.SIGTERM))"
    assert _run(temporary, "-c", start + asked) == "42 0\n"  # Ray takes no signal for itself


@pytest.mark.ray
def test_an_error_while_ray_starts_ends_the_process_as_itself(temporary: Path) -> None:
    start = "from rlinf_embodied.runtime.ray_cluster import begin_ray; begin_ray(128 << 20); "
    with pytest.raises(AssertionError, match="wrong input"):
        _run(temporary, "-c", start + "raise SystemExit('wrong input')")


@pytest.mark.ray
def test_workers_run_on_the_nodes_of_their_devices_which_are_held_for_them(temporary: Path) -> None:
    said = _run(temporary, str(TESTS / "two_node_session.py"), os.environ.get("RLINF_TEST_TIMEOUT_S", "60"))
    found = json.loads(
        next(line for line in said.splitlines() if line.startswith("{"))
    )  # Ray tells of the lost node, too
    assert found["versions"] == [[0], [1]]
    assert found["real"] == found["planned"]
    assert len(set(found["planned"])) == 2
    assert "num_devices is 3, but the Ray cluster at" in found["too many"]
    assert found["gone"] == found["was there"]
    assert (len(found["gone"]), found["left"]) == (1, 1)


@pytest.mark.ray
def test_a_training_that_loses_a_node_continues_with_the_rest_and_gives_the_same_weights(temporary: Path) -> None:
    said = _run(temporary, str(TESTS / "two_node_training.py"), str(temporary / "run"))
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["lost"] == found["alone"]
    (restart,) = map(json.loads, (temporary / "run/recoveries.jsonl").read_text().splitlines())
    assert restart["error"] == "LostWorkerError"
    assert restart["recovery_s"] > 0


@pytest.mark.parametrize(("asked", "left", "gets"), [(8, 64, 8), (8, 4, 4), (None, 4, 4)])
def test_after_a_lost_node_a_run_takes_no_devices_that_it_was_not_given(monkeypatch, asked, left, gets) -> None:
    def found(config: ClusterConfig) -> Cluster:
        number = config.num_devices or left
        return Cluster("ray", "cpu", number, number, 0)

    monkeypatch.setattr(sessions, "find_cluster", found)
    config = ClusterConfig(address="auto", num_devices=asked)
    assert sessions.find_remaining(config).num_devices == gets


def test_cores_next_to_accelerators_are_none_of_the_devices_that_a_run_was_given(monkeypatch) -> None:
    def found(config: ClusterConfig) -> Cluster:
        number = config.num_devices or 4
        assert number <= 4, "the other node's GPUs are gone"
        return with_cores(Cluster("ray", "cuda", number, 16, 80 << 30), config.cpu_devices, [float(64 << 30)])

    monkeypatch.setattr(sessions, "find_cluster", found)
    left = sessions.find_remaining(ClusterConfig(address="auto", num_devices=8, cpu_devices=8))
    assert (left.num_computing, len(left.cores_beside)) == (4, 8)
