"""Planning commands: plan.py from a profile to files and a table, emulate.py, and profile_stages.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openvla_folders as toys
import pytest
from runs import tiny_overrides
from scripts import call

from experiments.emulate import emulate
from experiments.plan import plan
from rlinf_embodied.compose import compose
from rlinf_embodied.config import EmulationConfig, PlanningConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning import search
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.profile import load_profile, workflow_for

ROOT = Path(__file__).resolve().parents[2]


def test_it_ranks_plans_and_writes_what_the_executor_and_people_read(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(search, "MOST_MOVES", 200)
    words = ["profile=grpo_llm", "cluster=h100x8", "num_ranked=2", f"run.dir={tmp_path}"]
    code, out, err = call(monkeypatch, capsys, "plan", *words)
    assert code == 0, err
    assert "the best" in out
    table = json.loads((tmp_path / "plan.json").read_text())["ranked"]
    assert len(table) >= 2
    for row in table:  # whole, in a pipe of whatever width
        assert [text for text in row.values() if text not in out] == []
    data = json.loads((tmp_path / "plan.json").read_text())
    work = workflow_for(load_profile(ROOT / "configs" / "profiles" / "grpo_llm.json"))
    assert set(resolve(data["name"], [data], data["num_devices"], work).places()) == set(work.stages)
    assert data["predicted_s_per_iteration"] == pytest.approx(float(data["ranked"][0]["s/iteration"]), abs=0.01)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with the shapes of a model, and no weights."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(toys.RAW))
    return folder


def table_of(folder: Path, *overrides: str) -> list[dict[str, str]]:
    return plan(compose(PlanningConfig, [*overrides, "memory.num_devices=[1,2]", f"run.dir={folder}"]))


def test_a_models_memory_is_planned_from_its_config_alone(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table_of(tmp_path, f"model={toy}", "memory.lora.rank=2")
    count = sum(p.numel() for p in toys.network().parameters())
    assert {(row["method"], row["learner"], row["devices"], row["stages"]) for row in rows} >= {
        ("full", "replicated", "any", "actor, rollout too"),
        ("LoRA, rank 2", "sharded", "2", "actor and rollout"),
    }
    printed, page = capsys.readouterr().out, (tmp_path / "memory.md").read_text()
    assert f"full: {count:,} of {count:,} parameters" in printed
    for row in rows:
        assert [text for text in row.values() if text not in printed or text not in page] == []


def test_a_policy_that_flows_is_planned_with_its_expert_alone_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table_of(tmp_path, "model=smolvla")
    assert "expert: 99,880,992 of 450,046,176 parameters" in capsys.readouterr().out
    assert {row["method"] for row in rows} == {"expert", "full"}


def test_adapters_that_lie_nowhere_are_refused(toy: Path, tmp_path: Path) -> None:
    config = compose(PlanningConfig, [f"model={toy}", "memory.lora.targets=[q_prj]", f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"memory.lora.targets is \['q_prj'\], but no linear layer of the model"):
        plan(config)
    assert not (tmp_path / "memory.md").exists()


CLUSTER = """
name: pair
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


def test_profile_stages_writes_a_profile_that_plans_can_be_made_with(monkeypatch, capsys, tmp_path) -> None:
    overrides = tiny_overrides(
        f"run.dir={tmp_path / 'profile'}", "cluster.num_devices=2", "plan.profile_budget_s=0.1", "eval.num_episodes=2"
    )
    code, out, _ = call(monkeypatch, capsys, "profile_stages", *overrides)
    assert code == 0
    assert "chunk-step" in out
    written = tmp_path / "profile/profile.json"
    assert set(load_profile(written).stages) == {"env", "policy", "actor"}
    arguments = [f"profile={written}", "cluster=local", f"run.dir={tmp_path / 'plan'}"]
    code, _, _ = call(monkeypatch, capsys, "plan", *arguments)
    assert code == 0
    assert json.loads((tmp_path / "plan/plan.json").read_text())["predicted_s_per_iteration"] > 0
