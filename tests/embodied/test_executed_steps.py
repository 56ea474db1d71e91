"""Training where only part of each predicted chunk is executed, and episodes end within a chunk."""

from __future__ import annotations

from pathlib import Path

from runs import metric_rows, tiny, train

SHORT = [
    *("env.chunk=4", "env.execute_steps=3", "env.horizon=10", "env.chunks_per_rollout=4"),
    *("run.num_iterations=2", "algorithm.max_resamples=0"),
]


def test_steps_that_are_not_executed_do_not_count(tmp_path: Path) -> None:
    config = tiny(f"run.dir={tmp_path}", *SHORT, "algorithm.ratio_level=chunk")
    assert config.env.chunks_per_episode == 4
    summary = train(config)
    assert summary["iterations"] == 2
    rows = config.env.num_envs
    for row in metric_rows(tmp_path):
        assert row["rollout/env_steps"] <= rows * 4 * 3
        assert row.get("rollout/episode_len", 10) <= 10
