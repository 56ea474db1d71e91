"""The commands under experiments/ in the process of the tests: what they import is imported once."""

from __future__ import annotations

import runpy
import sys

import pytest
from conftest import REPOSITORY


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, *arguments: str
) -> tuple[int, str, str]:
    """Runs a script in this process as `__main__`; returns its exit code and what it printed on both streams."""
    path = REPOSITORY / "experiments" / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err
