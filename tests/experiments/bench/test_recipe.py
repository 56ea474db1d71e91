"""What the benchmark of the recipe says about outcomes, and which commands it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.bench.recipe import __main__ as bench_recipe
from experiments.bench.recipe.__main__ import command
from experiments.bench.recipe.outcomes import Outcome, verdicts
from rlinf_embodied.compose import compose_train
from rlinf_embodied.telemetry.metrics import wilson


def evaluated(once: int, at_end: int, number: int = 300) -> dict:
    return {
        "success_once": once / number,
        "success_once_interval": list(wilson(once, number)),
        "success_at_end": at_end / number,
        "success_at_end_interval": list(wilson(at_end, number)),
        "num_episodes": number,
    }


OUTCOMES = [
    Outcome(1000, evaluated(270, 240), evaluated(297, 290), 50_000, 8, 1.0, 2.0, 0.1, 9.0, "a", 480),
    Outcome(1001, evaluated(290, 285), evaluated(296, 295), 80_000, 12, 1.1, 3.0, 0.2, 10.0, "b", 480),
    Outcome(1002, evaluated(280, 270), evaluated(300, 299), 60_000, 9, 1.2, 2.5, 0.1, 11.0, "c", 480),
]


def test_the_verdicts_count_seeds_whose_failures_were_halved() -> None:
    said = " ".join(verdicts(OUTCOMES))
    assert "halved in 3 of 3 seeds (success_once), 3 (success_at_end)" in said
    assert "worst 98.7 %, median 99.0 %" in said
    assert "at most 2.3 points below" in said
    assert "+3.3 to +16.7 points" in said
    worse = [Outcome(1, evaluated(290, 290), evaluated(294, 296), 1, 1, 1.0, 1.0, 0.0, 1.0, "a", 480)]
    assert "halved in 0 of 1 seeds (success_once), 1 (success_at_end)" in " ".join(verdicts(worse))


@pytest.mark.parametrize("recipe", bench_recipe.RECIPES)
def test_every_recipe_is_a_config(recipe: str, tmp_path: Path) -> None:
    words = command(recipe, 7, tmp_path, 30, None, ["run.num_iterations=2"])
    config = compose_train([word for word in words if "=" in word])
    assert (config.run.seed, config.eval.num_episodes, config.run.num_iterations) == (7, 30, 2)


def test_the_first_recipe_is_the_demos(tmp_path: Path) -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "train_vla.py" in line]
    (clone,) = [line.partition(" := ")[2] for line in lines if line.startswith("DEMO_CLONE :=")]
    assert "$(DEMO_CLONE)" in line
    for word in bench_recipe.RECIPES["pick"]:
        assert f" {word} " in line.replace("$(DEMO_CLONE)", clone)
