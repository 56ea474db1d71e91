"""experiments/profile_stages.py: what it writes is what plans are made with."""

import json

import pytest
from runs import tiny_overrides
from scripts import call

from rlinf_embodied.compose import compose_train
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


def test_sizes_of_blocks_are_compared(monkeypatch, capsys, tmp_path) -> None:
    overrides = tiny_overrides(f"run.dir={tmp_path}", "cluster.num_devices=2", "plan.profile_budget_s=0.1")
    rows = compose_train(overrides).env.num_envs
    code, out, _ = call(monkeypatch, capsys, "profile_stages", *overrides, f"block_sizes={rows},{rows // 2}")
    assert code == 0
    table = [line.split() for line in out.splitlines() if line.split()[:1] in ([str(rows)], [str(rows // 2)])]
    assert [line[:2] for line in table] == [[str(rows), "1"], [str(rows // 2), "2"]]
    assert "1.00" in {line[-1] for line in table}
    assert all(float(line[-1]) >= 1.0 for line in table)
    for size in (rows, rows // 2):
        workload = load_profile(tmp_path / f"profile_{size}.json").workload
        assert workload is not None
        assert workload.num_items == rows // size


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("8,x", "block_sizes is '8,x', but it is a list of rows: use block_sizes=8,16"),
        ("0", "block_sizes is '0'"),
        ("3", "env.block_size=3"),  # the tiny run's rows are no multiple of it
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_starts(monkeypatch, capsys, tmp_path, sizes, said) -> None:
    overrides = tiny_overrides(f"run.dir={tmp_path / 'new'}")
    code, _, err = call(monkeypatch, capsys, "profile_stages", *overrides, f"block_sizes={sizes}")
    assert code == 2
    assert said in err
    assert not (tmp_path / "new").exists()
