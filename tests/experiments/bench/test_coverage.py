"""The coverage benchmark: a name that is no task."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench.coverage import __main__ as script
from rlinf_embodied.errors import ConfigError


def test_a_name_that_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks is 'PickCub-v1'.*did you mean PickCube-v1"):
        script.measure(script.Options(tasks="PickCub-v1", out=str(tmp_path / "covered.json")))
