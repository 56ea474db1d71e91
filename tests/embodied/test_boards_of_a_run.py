"""Where the metrics of a run go: asked before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import metric_rows, tiny, train

from rlinf_embodied.errors import ConfigError


def test_a_board_that_is_not_installed_is_refused_before_the_run_folder_is_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"run.trackio is true, but trackio is not installed"):
        train(tiny("run.trackio=true", f"run.dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_a_run_without_boards_has_its_metrics(tmp_path: Path) -> None:
    train(tiny("run.tensorboard=false", "run.num_iterations=1", f"run.dir={tmp_path}"))
    assert [row["iteration"] for row in metric_rows(tmp_path)] == [1]
    assert not (tmp_path / "tensorboard").exists()
