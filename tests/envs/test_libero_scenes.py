"""LIBERO itself: what its rows show equals the benchmark's own loop, episodes have no past, and success is success.

Skipped where its environment is missing (python -m experiments.setup.foreign env=libero).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from envs.foreign.adapter import folder_of
from envs.foreign.env import make_env
from envs.foreign.process import environment_of
from envs.libero import NUM_TASKS, PRO
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.interfaces.envs import VectorEnv
from tests.observations import stacked

REFERENCE = Path(__file__).resolve().parents[1] / "libero_reference.py"
PYTHON = folder_of("libero") / "bin/python"
LISTING = """
import json, numpy
from envs.libero import NUM_TASKS, tasks_of
tasks = {suite: tasks_of(suite) for suite in NUM_TASKS}
print(json.dumps({suite: [t.instruction for t in listed] for suite, listed in tasks.items()}))
print(all(t.bddl.exists() and len(numpy.load(t.states)["states"]) == 50 for listed in tasks.values() for t in listed))
"""
STEPS, CHUNK = 5, 5
TRAINING = 1 << 30


pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs python -m experiments.setup.foreign env=libero"),
    pytest.mark.timeout(1800),  # a task takes seconds to build
]


def run_in_libero(*arguments: str) -> list[str]:
    """Runs LIBERO's Python and returns the lines that it prints."""
    done = subprocess.run(
        [str(PYTHON), "-P", *arguments], env=environment_of(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def section(suite: str, **options: float) -> EnvConfig:
    env = compose_evaluate(["env=libero", f"env.options.suite={suite}", "policy=random"]).env
    options = {**env.options, "timeout_s": 1500, **options}
    return replace(env, num_envs=1, block_size=1, obs_size=32, chunk=CHUNK, options=options)


@pytest.fixture(scope="module")
def drawer() -> Iterator[VectorEnv]:
    """A row of the task of LIBERO-10 with a drawer that is open at the start, in a cabinet whose place is drawn."""
    env = make_env(section("10", task=3), 1)
    yield env
    env.close()


def run(env: VectorEnv, seed: int, actions: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns proprioception and images of an episode at its start and after each chunk."""
    seen = [env.reset([seed])]
    seen += [env.step_chunk(chunk[None]).observation for chunk in actions.split(CHUNK)]
    return np.stack([o.proprio[0].numpy() for o in seen]), np.stack([stacked(o)[0].numpy() for o in seen])


def test_rows_show_what_the_benchmarks_own_loop_shows(drawer: VectorEnv, tmp_path: Path) -> None:
    """Bit for bit, for its first three initial states, in another order, with episodes of training in between."""
    out = tmp_path / "reference.npz"
    run_in_libero(str(REFERENCE), str(out), "libero_10", "3", "3", str(STEPS), "7")
    theirs = np.load(out)
    actions = torch.from_numpy(theirs["actions"])
    for state, before in ((2, TRAINING + 1), (0, TRAINING + 9), (1, 31)):
        run(drawer, before, actions.flip(0))
        proprio, images = run(drawer, state, actions)
        np.testing.assert_array_equal(proprio, theirs["proprio"][state, ::CHUNK])
        np.testing.assert_array_equal(images, theirs["images"][state, ::CHUNK])
    assert not theirs["success"].any()
    assert len(np.unique(theirs["proprio"][:, -1], axis=0)) == 3


def test_every_suite_has_all_tasks_with_files_and_50_initial_states() -> None:
    instructions, is_complete = run_in_libero("-c", LISTING)[-2:]
    listed = json.loads(instructions)
    assert {suite: len(texts) for suite, texts in listed.items()} == NUM_TASKS
    assert is_complete == "True"
    shared = {suite: len(texts) - len(set(texts)) for suite, texts in listed.items()}
    known = {"libero_90": 16, "libero_spatial_task": 2, "libero_goal_task": 1}  # tasks that share an instruction
    assert {suite: number for suite, number in shared.items() if number} == known


@pytest.mark.parametrize("kind", PRO)
def test_a_variant_of_libero_pro_changes_what_it_says(kind: str) -> None:
    base, other = (make_env(section(suite, task=3), 1) for suite in ("goal", f"goal_{kind}"))
    try:
        first, changed = (env.reset([0]) for env in (base, other))
        assert (first.instruction != changed.instruction) == (kind in ("lan", "task"))
        assert first.privileged is not None
        assert changed.privileged is not None
        moved_m = (first.privileged - changed.privileged)[0, 8:].abs().max()  # of the goal's objects
        assert kind not in ("swap", "lan") or (moved_m > 0.1) == (kind == "swap")
    finally:
        base.close()
        other.close()


def test_a_drawn_start_is_a_function_of_its_seed_and_settles(drawer: VectorEnv) -> None:
    actions = torch.rand(STEPS, 7, generator=torch.Generator().manual_seed(3)) * 2 - 1
    first = run(drawer, TRAINING + 5, actions)
    run(drawer, 4, actions.flip(0))
    other = run(drawer, TRAINING + 6, actions)
    again = run(drawer, TRAINING + 5, actions)
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left, right)
    assert (first[1] != other[1]).any()  # images; the arm starts alike
