"""experiments/plan.py: from a profile to a table, a plan file that runs, a picture and a trace; a model's memory."""

import json
from pathlib import Path

import openvla_folders as toys
import pytest
from scripts import call

from experiments.plan import plan
from rlinf_embodied.compose import compose
from rlinf_embodied.config import PlanningConfig
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
