"""The table that the batched backend looks up is written from what the coverage benchmark found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import REPOSITORY

from experiments.setup import covered as script

EQUAL = {"verdict": "equal", "reason": ""}
TASKS = {
    "PickCube-v1": {
        "default_robot": "panda",
        "robots": {
            "panda": {"joints": {**EQUAL, "default": True}, "hand": EQUAL},
            "fetch": {"joints": {"verdict": "fallback", "reason": "cube of row 1 differs"}},
            "far": {"default": {"verdict": "needs files", "reason": "needs `download far`"}},
        },
    },
}


@pytest.mark.sim
def test_what_was_found_is_what_the_backend_looks_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from envs.batched import build
    from rlinf_embodied.errors import SimulatorError

    (tmp_path / "found.json").write_text(json.dumps({"machine": {"versions": build.versions()}, "tasks": TASKS}))
    for module in (script, build):
        monkeypatch.setattr(module, "COVERED", tmp_path / "covered.json")
    script.write(script.Options(results=str(tmp_path / "found.json")))
    build._table.cache_clear()
    try:
        build.check_equal("PickCube-v1")
        build.check_equal("PickCube-v1", control_mode="hand", obs_mode="rgb")
        build.check_equal("PickCube-v1", robot_uids="panda", control_mode="joints")
        with pytest.raises(SimulatorError, match=r"PickCube-v1.*cube of row 1 differs.*use env.backend=stock"):
            build.check_equal("PickCube-v1", robot_uids="fetch", control_mode="joints")
    finally:
        build._table.cache_clear()


def test_the_repositorys_table_is_that_of_the_published_results() -> None:
    found = json.loads((REPOSITORY / "docs/results/coverage.json").read_text())
    assert script.covered(found) == json.loads(script.COVERED.read_text())
