"""Training with several seeds."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.seeds import run_seeds


def test_each_seed_has_its_own_folder_and_a_failure_ends_them(monkeypatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        ran.append(command[2:])
        return SimpleNamespace(returncode=3 if len(ran) == 2 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_seeds(["env=point_reach", "run.seeds=0-2,7", "run.dir=r"]) == 3
    assert ran == [["env=point_reach", f"run.seed={k}", f"run.dir=r/seed_{k}"] for k in (0, 1)]


@pytest.mark.parametrize("words", [["run.seeds=0-2"], ["run.seeds=a", "run.dir=r"], ["run.seeds=1,1", "run.dir=r"]])
def test_seeds_that_cannot_be_meant_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"run\.seeds is"):
        run_seeds(words)
