"""The benchmark of learning from transitions reads a run's curve, and takes words that make sense together only."""

from __future__ import annotations

import pytest

from experiments.bench.control import cases
from experiments.bench.control.curves import Curve
from rlinf_embodied.algorithms.transitions import ReplayConfig
from rlinf_embodied.compose import compose_train
from rlinf_embodied.errors import ConfigError


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_is_a_training_that_composes(tmp_path, name) -> None:
    case, words = cases.CASES[name], cases.words_of(name, 7, tmp_path, [])
    config = compose_train(words)
    if not isinstance(config.algorithm, ReplayConfig):
        assert config.hierarchy.on == bool(case.source)
        assert config.warm_start.checkpoint == (
            f"{tmp_path}/{case.source}/seed_7/run/checkpoints/latest" if case.source else None
        )
        return
    assert config.algorithm.acts == (case.unit == "env steps")
    assert config.run.num_iterations > config.algorithm.typical_iteration(config.env)


def test_a_case_is_trained_once_with_what_it_begins_with_and_its_settings_stay(tmp_path, monkeypatch) -> None:
    trained = []

    def found(words, seed, folder, points) -> Curve:
        trained.append((folder.parent.name, seed, points, words))
        folder.mkdir(parents=True)
        told = {"return": 1.0, "return_interval": [0.0, 2.0]}
        return Curve(seed, [0, 10], [float(seed), 5.0 * seed], [], 1.0, before=told, after=told, cpu_s=3.0)

    monkeypatch.setattr(cases, "trained", found)
    first = [cases.case_curve("iql", seed, tmp_path, 4, []) for seed in (1, 2)]
    assert [(name, seed, points) for name, seed, points, _ in trained] == [
        (name, seed, 4) for seed in (1, 2) for name in ("sac", "iql")
    ]
    assert f"data={tmp_path}/sac/seed_2/run/checkpoints/latest" in trained[-1][3]
    assert [cases.case_curve("iql", seed, tmp_path, 4, []) for seed in (1, 2)] == first
    assert len(trained) == 4
    row = cases.table({"iql": first}).rows[0]
    assert list(row) == ["iql", "10 updates", "1.5", "7.5", "5.0", "3"]
    with pytest.raises(ConfigError, match=r"sac/seed_1 holds a training with other settings: use another folder="):
        cases.case_curve("iql", 1, tmp_path, 4, ["run.num_iterations=2"])
