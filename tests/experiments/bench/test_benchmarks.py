"""Every benchmark is a command: found by its name, with defaults, and one clear line for wrong words."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import experiments.bench
from experiments.bench import revisions
from experiments.bench.harness import REPOSITORY, Benchmark, Run
from rlinf_embodied.errors import ConfigError

FOLDER = Path(str(experiments.bench.__file__)).parent
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
    for path in FOLDER.rglob("*.py")
    if "BENCHMARK = Benchmark(" in path.read_text(encoding="utf-8")
)


def benchmark(name: str) -> Benchmark:
    path = FOLDER.joinpath(*name.split("."))
    module = f"experiments.bench.{name}" + (".__main__" if path.is_dir() else "")
    return importlib.import_module(module).BENCHMARK


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_has_the_name_of_its_module_and_refuses_unknown_words(name: str, capsys) -> None:
    found = benchmark(name)
    assert found.name == name
    assert found.options() is not None
    if not found.takes_overrides:
        assert found.main(["nonsense=1"]) == 2
        assert capsys.readouterr().err.startswith("error: nonsense")


def test_two_revisions_alternate_and_their_metric_is_compared(monkeypatch, tmp_path) -> None:
    (tmp_path / "experiments").mkdir()
    speeds = {str(tmp_path): 100.0, str(REPOSITORY): 98.0}
    made = []
    monkeypatch.setattr(revisions, "trained", lambda checkout, *_: made.append(checkout) or speeds[str(checkout)])
    report = revisions.measure(Run(revisions.Options(old=str(tmp_path), rounds=2), [], {}))
    assert made == [tmp_path, REPOSITORY, REPOSITORY, tmp_path]
    assert "new / old: 0.98 (0.98-0.98), goal 1: missed (floor 0.97: held)" in report.text
    with pytest.raises(ConfigError, match=r"old is '', but it must be another checkout"):
        revisions.measure(Run(revisions.Options(), [], {}))
