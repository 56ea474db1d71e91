"""experiments/emulate.py as a user starts it: real workers, sleeping stages, a table and a file of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import call

CLUSTER = """
name: pair
emulated: true
nodes: [{kind: h100, num_nodes: 1, devices_per_node: 2, memory_bytes: 200.0e+9, cores_per_node: 64}]
"""


@pytest.mark.ray
def test_a_launch_lists_its_probes_starts_within_two_minutes_and_predicts_what_is_then_measured(
    monkeypatch, capsys, ray_cluster, tmp_path: Path
) -> None:
    cluster, out = tmp_path / "pair.yaml", tmp_path / "out.json"
    cluster.write_text(CLUSTER)
    code, _, err = call(
        monkeypatch,
        capsys,
        "emulate",
        *("profile=maniskill_openvla", "num_items=128", f"cluster={cluster}", "probes=true"),
        *("run.num_iterations=1", f"out={out}"),
    )
    assert code == 0, err
    data = json.loads(out.read_text())
    launch, (plan,) = data["launch"], data["plans"]
    assert [probe["probe"] for probe in launch["probes"]] == ["collocated on 2", "disaggregated"]
    assert max(probe["blocks per device"] for probe in launch["probes"]) <= 4
    assert data["emulated"] is True
    assert plan["measured_s"][0] >= plan["due_s"][0]
    assert launch["profile_s"] + launch["plan_s"] < 120
    (predicted_s,) = launch["predicted_s"].values()
    assert predicted_s == pytest.approx(plan["due_s"][0], rel=0.1)
