"""What the benchmark of the recipe says about outcomes, and which commands it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.bench.recipe import __main__ as bench_recipe
from experiments.bench.recipe.__main__ import command
from rlinf_embodied.compose import compose_train


@pytest.mark.parametrize("recipe", bench_recipe.RECIPES)
def test_every_recipe_is_a_config(recipe: str, tmp_path: Path) -> None:
    words = command(recipe, 7, tmp_path, 30, None, ["run.num_iterations=2"])
    config = compose_train([word for word in words if "=" in word])
    assert (config.run.seed, config.eval.num_episodes, config.run.num_iterations) == (7, 30, 2)


def test_the_first_recipe_is_the_demos(tmp_path: Path) -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "train_vla.py" in line]
    for word in bench_recipe.RECIPES["pick"]:
        assert f" {word} " in line
