"""Training where only part of each predicted chunk is executed, and episodes end within a chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import GRPO, metric_rows, tiny, train

SHORT = [
    *("env.chunk=4", "env.execute_steps=3", "env.horizon=10", "env.chunks_per_rollout=4"),
    *("run.num_iterations=2", "algorithm.max_resamples=0"),
]


@pytest.mark.parametrize(("algorithm", "level"), [([], "chunk"), (GRPO, "token")], ids=["ppo", "grpo"])
def test_steps_that_are_not_executed_do_not_count(tmp_path: Path, algorithm: list[str], level: str) -> None:
    whole = [text for text in algorithm if not text.startswith("env.chunks_per_rollout")]
    config = tiny(f"run.dir={tmp_path}", *whole, *SHORT, f"algorithm.ratio_level={level}")
    assert config.env.chunks_per_episode == 4
    summary = train(config)
    assert summary["iterations"] == 2
    rows = config.env.num_envs
    for row in metric_rows(tmp_path):
        assert row["rollout/env_steps"] <= rows * 4 * 3
        assert row.get("rollout/episode_len", 10) <= 10
