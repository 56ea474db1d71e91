"""An algorithm from outside this project is one Python file and one yaml."""

from __future__ import annotations

from control_runs import small
from runs import metric_rows, train

YAML = "_target_: own_algorithm.FilteredCloningConfig\nthreshold: -0.5\n"


def test_it_is_chosen_by_its_file_and_trains(tmp_path) -> None:
    path = tmp_path / "filtered.yaml"
    path.write_text(YAML)
    config = small(
        f"algorithm={path}", f"run.dir={tmp_path / 'run'}", "algorithm.critic_hidden_size=None", "env.chunk=1"
    )
    assert config.algorithm.threshold == -0.5
    train(config)
    assert any(row.get("losses/paid", 0) > 0 for row in metric_rows(tmp_path / "run"))
