"""experiments/emulate.py: real workers, sleeping stages, a table, and what is predicted and measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import call

from experiments.emulate import emulate
from rlinf_embodied.compose import compose
from rlinf_embodied.config import EmulationConfig

CLUSTER = """
name: pair
emulated: true
nodes: [{kind: h100, num_nodes: 1, devices_per_node: 2, memory_bytes: 200.0e+9, cores_per_node: 64}]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "pair.yaml"
    path.write_text(CLUSTER)
    return f"cluster={path}"


@pytest.mark.ray
def test_a_plan_runs_on_emulated_devices_and_is_compared_with_its_prediction(
    monkeypatch, capsys, ray_cluster, cluster: str
) -> None:
    words = ["profile=grpo_llm", "num_items=512", cluster, "plan=collocated", "time_scale=0.02"]
    code, printed, err = call(monkeypatch, capsys, "emulate", *words, "run.num_iterations=1")
    assert code == 0, err
    assert "EMULATED reasoning on pair" in printed


@pytest.mark.ray
def test_a_launch_lists_its_probes_starts_within_two_minutes_and_predicts_what_is_then_measured(
    capsys, ray_cluster, cluster: str
) -> None:
    words = ["profile=maniskill_openvla", "num_items=128", cluster, "probes=true", "run.num_iterations=1"]
    (done,) = emulate(compose(EmulationConfig, words))
    printed = capsys.readouterr().out
    assert re.findall(r"^(collocated on 2|disaggregated) ", printed, re.MULTILINE) == [
        "collocated on 2",
        "disaggregated",
    ]
    (times,) = re.findall(r"starts after ([\d.]+) s of probes and ([\d.]+) s of planning", printed)
    assert sum(map(float, times)) < 120
    (predicted_s,) = re.findall(r"([\d.]+) s by what the probes measured", printed)
    assert float(predicted_s) == pytest.approx(done.due_s[0], rel=0.02)
    assert done.due_s[0] == pytest.approx(done.predicted_s, rel=0.01)
    assert done.measured_s[0] >= done.due_s[0]
