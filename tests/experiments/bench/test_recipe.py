"""What the benchmark of the recipe says about outcomes, and which commands it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.bench.recipe import __main__ as bench_recipe
from experiments.bench.recipe.__main__ import Options, command, seeds_of
from experiments.bench.recipe.outcomes import Outcome, overview, page
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import WarmStartConfig
from rlinf_embodied.errors import ConfigError, WorkerError
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


def test_seeds_are_a_list_or_a_range() -> None:
    assert seeds_of("3,1") == [3, 1]
    assert seeds_of("1000-1003") == [1000, 1001, 1002, 1003]
    with pytest.raises(ConfigError, match=r"seeds is 'a-b', .* use 0,3 or 1000-1009"):
        seeds_of("a-b")


def test_worst_is_the_worst_of_each_column_and_all_episodes_are_counted_together() -> None:
    rows = {row[0]: row for row in overview(OUTCOMES)}
    assert rows["worst"][1:5] == ["90.0 %", "98.7 %", "80.0 %", "96.7 %"]
    assert rows["median"][1:5] == ["93.3 %", "99.0 %", "90.0 %", "98.3 %"]
    assert rows["worst"][5] == "80,000"  # more steps are worse
    assert rows["best"][7] == "2.0 min"
    low, high = wilson(297 + 296 + 300, 900)
    assert rows["all episodes"][2] == f"99.2 % [{100 * low:.1f}, {100 * high:.1f}]"


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


def test_a_report_names_the_processor_and_the_command() -> None:
    rows = [{name: getattr(o, name) for name in Outcome.__dataclass_fields__} for o in OUTCOMES]
    where = {"processor": "Some CPU", "cores": 2, "date": "2026-11-22 10:00:00"}
    text = page({"arguments": ["seeds=1000-1002"], "machine": where, "outcomes": rows})
    assert text.startswith("Some CPU, 2 cores, 2026-11-22")
    assert "python -m experiments.bench.recipe seeds=1000-1002" in text
    assert "| 1001 | 96.7 %" in text


def test_fewer_demonstrations_are_seen_as_often_as_the_usual_number() -> None:
    config = compose_train(["env=maniskill_pick", *bench_recipe.with_demos(120)]).warm_start
    usual = WarmStartConfig()
    assert config.num_demos * config.epochs == usual.num_demos * usual.epochs
    assert config.num_demos * config.head_epochs == usual.num_demos * usual.head_epochs


def test_a_run_that_fails_is_told_and_the_one_beside_it_is_ended(tmp_path: Path, monkeypatch) -> None:
    def words(recipe: str, seed: int, *rest: object) -> list[str]:
        return [
            "sh",
            "-c",
            "until [ -s $PIDFILE ]; do sleep 0.1; done; echo broken; exit 3"
            if seed == 1
            else "echo $$ > $PIDFILE; exec sleep 600",
        ]

    pidfile = tmp_path / "pid"
    monkeypatch.setenv("PIDFILE", str(pidfile))
    monkeypatch.setattr(bench_recipe, "command", words)
    monkeypatch.setattr(bench_recipe, "num_cores", lambda: 2)
    with pytest.raises(WorkerError, match=r"the run of seed 1 ended with exit code 3, see \S+:\nbroken"):
        bench_recipe.run_all(Options(seeds="0,1", keep=str(tmp_path)), [], lambda done: None)
    assert not Path(f"/proc/{pidfile.read_text().strip()}").exists()
