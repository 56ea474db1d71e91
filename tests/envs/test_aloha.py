"""gym-aloha's episodes repeat themselves; skipped where its environment is missing (experiments.setup.aloha)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from envs.foreign.place import REPOSITORY
from envs.foreign.process import environment_of
from experiments.setup.aloha import ALOHA

REFERENCE = Path(__file__).resolve().parents[1] / "aloha_reference.py"
INSTALLED = pytest.mark.skipif(bool(ALOHA.place.missing()), reason=ALOHA.place.missing())


@INSTALLED
@pytest.mark.slow
@pytest.mark.parametrize("task", ["AlohaTransferCube-v0", "AlohaInsertion-v0"])
def test_an_episode_is_a_function_of_seed_and_actions_to_the_last_number_and_pixel(tmp_path: Path, task: str) -> None:
    out = tmp_path / "told.json"
    command = [str(ALOHA.place.python()), "-P", str(REFERENCE), str(out), f"gym_aloha:gym_aloha/{task}", "300", "1"]
    done = subprocess.run(command, env=environment_of(REPOSITORY, "osmesa"), cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    told = json.loads(out.read_text())
    print(told)
    assert told["numbers"] == told["pixels"] == 0
    assert told["numbers compared"] > 300_000
    assert told["numbers of another seed"] > 1000
    assert told["pixels of another seed"] > 0
