"""The benchmark of learning from transitions reads a run's curve, and takes words that make sense together only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.control import __main__ as control
from experiments.bench.control.cases import CASES, words_of
from rlinf_embodied.algorithms.transitions import ReplayConfig
from rlinf_embodied.compose import compose_train
from rlinf_embodied.errors import ConfigError


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_a_training_that_composes(tmp_path, name) -> None:
    case, config = CASES[name], compose_train(words_of(name, 7, tmp_path, []))
    if not isinstance(config.algorithm, ReplayConfig):
        assert config.hierarchy.on == bool(case.source)
        assert config.warm_start.checkpoint == (
            f"{tmp_path}/{case.source}/seed_7/checkpoints/latest" if case.source else None
        )
        return
    assert config.algorithm.acts == (case.unit == "env steps")
    assert config.run.num_iterations > config.algorithm.typical_iteration(config.env)


def test_a_case_is_trained_once_with_what_it_begins_with_and_its_settings_stay(tmp_path, monkeypatch) -> None:
    trained = []

    class Trained:
        """Stands for a training: writes the files of its run."""

        def __init__(self, name: str, command: list[str], log: Path) -> None:
            trained.append((name, command[2:]))
            seed = int(name[-1])
            summary = {"iterations": 2, "rl_s": 3.0}
            for key, score in (("before", 1.0 * seed), ("after", 5.0 * seed)):
                summary[key] = {"return": score, "return_interval": [0.0, score]}
            rows = [{"iteration": 1, "global_step": 5, "eval/return": 3.0}, {"iteration": 2, "global_step": 10}]
            (log.parent / "config.yaml").write_text("{}")
            (log.parent / "manifest.json").write_text(json.dumps({"command": command[1:]}))
            (log.parent / "summary.json").write_text(json.dumps(summary))
            (log.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def wait(self) -> None:
            """Has ended."""

    monkeypatch.setattr(control, "Child", Trained)
    runs = [control.trained("iql", seed, tmp_path, 2, []) for seed in (1, 2)]
    assert [name for name, _ in trained] == ["sac, seed 1", "iql, seed 1", "sac, seed 2", "iql, seed 2"]
    assert f"data={tmp_path}/sac/seed_2/checkpoints/latest" in trained[-1][1]
    assert "eval.every=3" in trained[-1][1]
    assert list(control.curve(runs[0])) == [(0, 1), (5, 3), (10, 5)]
    assert [control.trained("iql", seed, tmp_path, 2, []) for seed in (1, 2)] == runs
    assert len(trained) == 4
    row = control.table({"iql": runs}).rows[0]
    assert list(row) == ["iql", "10 updates", "1.5", "7.5", "5.0", "3"]
    control.draw({"iql": runs}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0
    with pytest.raises(ConfigError, match=r"sac/seed_1 holds a training with other settings: use another folder="):
        control.trained("iql", 1, tmp_path, 2, ["run.num_iterations=2"])
