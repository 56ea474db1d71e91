"""Every benchmark is a command: found by its name, with defaults, and one clear line for wrong words."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import experiments.bench
from experiments.bench.harness import Benchmark

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
        with pytest.raises(SystemExit, match="2"):
            found.main(["nonsense=1"])
        assert capsys.readouterr().err.startswith("error: nonsense")
