"""Rollouts that run ahead of the update: nothing is lost where a run stops."""

from __future__ import annotations

import pytest
from runs import BEHIND, metric_rows, short, tiny, train

from rlinf_embodied.errors import ConfigError


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder and the summary of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, train(short(*BEHIND, f"run.dir={folder}"))


@pytest.mark.parametrize("stopped", [1, 3])
def test_a_stopped_run_continues_under_another_plan_to_the_same_weights(tmp_path, straight, stopped: int) -> None:
    folder, summary = straight
    train(short(*BEHIND, f"run.dir={tmp_path}", f"run.num_iterations={stopped}"))
    found = train(short(*BEHIND, f"run.dir={tmp_path}", "plan=disaggregated", "cluster.num_devices=3"))
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert metric_rows(tmp_path) == metric_rows(folder)


def test_without_a_correction_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.tis_cap is None, but with a staleness of 1.*tis_cap=2\.0"):
        train(tiny(f"run.dir={tmp_path}/run", "plan=collocated", "plan.max_staleness=1"))
    assert list(tmp_path.iterdir()) == []
