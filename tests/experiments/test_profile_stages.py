"""experiments/profile_stages.py as a user starts it."""

import json
import subprocess
import sys

from conftest import REPOSITORY
from runs import tiny_overrides

from rlinf_embodied.flow.profile_file import load_profile


def test_profile_stages_writes_a_profile_that_plans_can_be_made_with(tmp_path) -> None:
    overrides = tiny_overrides(
        f"run.dir={tmp_path / 'profile'}", "cluster.num_devices=2", "plan.profile_budget_s=0.1", "eval.num_episodes=2"
    )
    command = [sys.executable, "experiments/profile_stages.py", *overrides]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "chunk-step" in answer.stdout
    assert set(load_profile(tmp_path / "profile/profile.json").stages) == {"env", "policy", "actor"}
    command = [sys.executable, "experiments/plan.py", f"profile={tmp_path / 'profile/profile.json'}", "cluster=local"]
    answer = subprocess.run(
        [*command, f"run.dir={tmp_path / 'plan'}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads((tmp_path / "plan/plan.json").read_text())["predicted_s_per_iteration"] > 0
