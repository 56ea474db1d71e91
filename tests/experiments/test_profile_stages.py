"""experiments/profile_stages.py: what it writes is what plans are made with."""

import json

from runs import tiny_overrides
from scripts import call

from rlinf_embodied.planning.profile import load_profile


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
