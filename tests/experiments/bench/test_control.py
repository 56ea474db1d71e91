"""The benchmark of learning from transitions reads a run's curve, and takes words that make sense together only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_runs import small, train

from experiments.bench.control import BENCHMARK, Curve, StableBaselines, draw, read_curve


def test_a_curve_is_that_of_the_run(tmp_path) -> None:
    config = small(f"run.dir={tmp_path}", "eval.every=2")
    summary = train(config)
    curve = read_curve(tmp_path, 3, config)
    assert curve.steps == [0, 80, 160]
    assert (curve.returns[0], curve.last) == (summary["return_before"], summary["return_after"])
    assert curve.digest == summary["weights_sha256"]
    assert curve.success == []
    assert curve.steps_per_s > 0


@pytest.mark.slow
def test_the_peer_learns_with_our_settings() -> None:
    config = small("algorithm.updates_per_step=1")
    curve = StableBaselines(replace(config, eval=replace(config.eval, num_episodes=1))).learn(0, 2)
    assert curve.steps == [0, 80, 160]
    assert len(curve.returns) == 3


def test_a_picture_is_drawn(tmp_path) -> None:
    curves = {name: [Curve(k, [0, 10], [0.0, k], [], 1.0) for k in (1, 2)] for name in ("ours", "sb3")}
    draw(curves, "a task", "env steps", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["seeds=a"], "seeds is 'a', but seeds are whole numbers"),
        (["peer=td3"], "peer is 'td3', but there is sb3 only"),
        (["peer=sb3", "algorithm=rlpd"], "peer is 'sb3', but its SAC is plain"),
        (["algorithm=sak"], "algorithm is 'sak'"),
    ],
)
def test_bad_words_are_named(words, says, capsys) -> None:
    assert BENCHMARK.main(words) == 2
    assert says in capsys.readouterr().err
