"""gym-aloha's episodes repeat themselves; skipped where its environment is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from envs.foreign.adapter import missing, python_of
from envs.foreign.process import environment_of

REFERENCE = Path(__file__).resolve().parents[1] / "aloha_reference.py"
INSTALLED = pytest.mark.skipif(bool(missing("aloha")), reason=missing("aloha"))


@INSTALLED
@pytest.mark.slow
@pytest.mark.parametrize("task", ["AlohaTransferCube-v0", "AlohaInsertion-v0"])
def test_an_episode_is_a_function_of_seed_and_actions_to_the_last_number_and_pixel(tmp_path: Path, task: str) -> None:
    out = tmp_path / "told.json"
    command = [
        str(python_of("aloha")),
        "-P",
        str(REFERENCE),
        str(out),
        f"gym_aloha:gym_aloha/{task}",
        "300",
        "1",
    ]
    done = subprocess.run(command, env=environment_of(), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    told = json.loads(out.read_text())
    print(told)
    assert told["numbers"] == told["pixels"] == 0
    assert told["numbers compared"] > 300_000
    assert told["numbers of another seed"] > 1000
    assert told["pixels of another seed"] > 0
