"""A full disk of the driver ends a run with one line that says which file, and the same command resumes the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf_embodied.errors import RunFileError
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.trace import write_trace

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
SAID = r"{} cannot be written \(No space left on device\): free space .* give the same command again"


@pytest.mark.parametrize("name", ["recoveries.jsonl", "trace.json"])
def test_the_file_is_named_and_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(FULL)
    write = {
        "recoveries.jsonl": lambda: RunFolder(tmp_path).append_json(name, {"a": 1}),
        "trace.json": lambda: write_trace(tmp_path / name, []),
    }[name]
    with pytest.raises(RunFileError, match=SAID.format(f".*{name}")):
        write()


def test_a_file_that_is_replaced_as_a_whole_stays_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("plan.json", "{}")
    (tmp_path / f".plan.json.partial-{os.getpid()}").symlink_to(FULL)
    with pytest.raises(RunFileError, match=SAID.format("plan.json")):
        folder.write_text("plan.json", "[]")
    assert (tmp_path / "plan.json").read_text() == "{}"
