"""What the benchmark of the recipe says about outcomes, and which commands it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.bench.recipe import __main__ as bench_recipe
from experiments.bench.recipe.__main__ import commands
from rlinf_embodied.compose import compose, compose_train
from rlinf_embodied.config import ExportConfig


@pytest.mark.parametrize("recipe", [*bench_recipe.RECIPES, *bench_recipe.TAUGHT])
def test_every_recipe_is_a_config(recipe: str, tmp_path: Path) -> None:
    *before, last = commands(recipe, 7, tmp_path, 30, None, ["run.num_iterations=2"])
    config = compose_train([word for word in last if "=" in word])
    assert (config.run.seed, config.eval.num_episodes, config.run.num_iterations) == (7, 30, 2)
    if before:
        teacher, recorded = ([word for word in words if "=" in word] for words in before)
        assert not compose_train(teacher).env.cameras
        assert compose(ExportConfig, recorded).env.options == config.env.options


def test_the_first_recipe_is_the_demos(tmp_path: Path) -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "train_vla.py" in line]
    for word in bench_recipe.RECIPES["pick"]:
        assert f" {word} " in line
