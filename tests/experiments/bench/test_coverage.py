"""The coverage benchmark: how it takes a task whose process dies, and a name that is no task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.bench.coverage import __main__ as script
from rlinf_embodied.errors import ConfigError


def test_a_process_that_dies_leaves_what_it_had_found_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    lines = [{"robots": ["panda", "default"], "modes": ["joints"], "reason": ""}]
    worker.write_text(
        "import os, sys\n"
        "into = next(a for a in sys.argv if a.startswith('into=')).partition('=')[2]\n"
        f"open(into, 'w').write({chr(10).join(map(json.dumps, lines))!r})\n"
        "print('a body fell through', file=sys.stderr)\n"
        "sys.stderr.flush()\n"
        "os._exit(11)\n"
    )
    monkeypatch.setattr(script, "WORKER", (sys.executable, str(worker)))
    found, fate = script.run_worker("A-v1", 60)
    assert found == {"panda": {"joints": ""}, "default": {"joints": ""}}
    assert fate == "the process ended with 11: a body fell through"
    assert script.summary(found) == "2 of 2 equal"
    worker.write_text("import time\ntime.sleep(60)\n")
    assert script.run_worker("A-v1", 1) == ({}, "the process had not ended after 1 s")


def test_a_name_that_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks is 'PickCub-v1'.*did you mean PickCube-v1"):
        script.measure(script.Options(tasks="PickCub-v1", out=str(tmp_path / "covered.json")))
