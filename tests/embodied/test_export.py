"""Episodes as datasets: what is written is what was acted and seen, and wrong input costs no episode."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import TINY, clone, tiny

from envs.point_reach import REACHED
from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import ExportConfig, Precision
from rlinf_embodied.data.lerobot import LeRobotDataset, LeRobotEpisode
from rlinf_embodied.embodied import export
from rlinf_embodied.embodied.demonstrations import for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.errors import CheckpointError, ConfigError, SimulatorError
from rlinf_embodied.randomness import reset_seed
from tests.observations import stacked

OF_ENV = {key: value for key, value in TINY.items() if key.startswith(("env", "run.seed"))}


def asked(out: Path, *overrides: str) -> ExportConfig:
    """Returns the config of an export of the expert's episodes in point_reach, unless `overrides` say otherwise."""
    given = dict(text.split("=", 1) for text in overrides)
    base = OF_ENV | {"policy": "expert", "out": out, "num_episodes": 20}
    return compose_export([f"{key}={value}" for key, value in (base | given).items()])


def written(config: ExportConfig) -> list[LeRobotEpisode]:
    dataset = LeRobotDataset(Path(config.out), "out")
    episodes = []
    for frames in map(np.array, map(dataset.frames, range(dataset.num_episodes))):
        images = {name: dataset.images(name, frames) for name in dataset.cameras}
        fields = dataset.columns["action"][frames], dataset.state[frames], images
        episodes.append(LeRobotEpisode(dataset.task(frames[0]), *fields))
    return episodes


def silent(done: int, total: int) -> None:
    pass


def test_actions_of_an_episode_lead_from_each_frame_to_the_next_until_it_has_stayed_solved(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    config = asked(tmp_path / "set", "env.hold_steps=3")
    found = export_dataset(config, lambda done, total: steps.append((done, total)))
    assert (found, steps) == ({"run": 20, "solved": 20, "written": 20}, [(16, 20), (20, 20)])
    env = make_env(for_demonstrations(replace(config.env, chunk=1)), 1, "cpu")
    for number, episode in enumerate(written(config)[:4]):
        shown, success = env.reset([int(reset_seed(config.run.seed, -1, number))]), []
        for state, image, action in zip(episode.state, episode.images["base_camera"], episode.actions, strict=True):
            assert np.array_equal(state, shown.proprio[0])
            assert np.array_equal(image, stacked(shown)[0, 0])
            assert episode.task == shown.instruction[0]
            shown = env.step_chunk(torch.from_numpy(action)[None, None]).observation
            success.append(float((shown.proprio[0, :2] - shown.proprio[0, 2:]).norm()) < REACHED)
        assert success[-4:] == [False, True, True, True], "the last steps, and the first that solves it"


def test_a_checkpoint_acts_chunk_by_chunk_as_in_training_and_failures_are_written_on_demand(tmp_path: Path) -> None:
    section = ["env.execute_steps=3"]  # of chunks of four
    folder = clone(tiny(*section, "warm_start.head_epochs=4"))  # with all epochs no episode fails
    run = [f"checkpoint={folder}", "policy=checkpoint", *section]
    config = asked(tmp_path / "all", *run, "successes_only=false")
    every = export_dataset(config, silent)
    solved = export_dataset(asked(tmp_path / "solved", *run), silent)
    assert 0 < every["solved"] < every["run"] == every["written"] == 20
    assert solved["solved"] == solved["written"] == every["solved"]
    policy = load_policy(tiny().policy, str(folder), "cpu").policy
    env = make_env(replace(for_demonstrations(config.env), chunk=1), 1, "cpu")
    for number, episode in enumerate(written(config)[:2]):
        shown = env.reset([int(reset_seed(config.run.seed, -1, number))])
        for step, action in enumerate(torch.from_numpy(episode.actions)):
            if step % 3 == 0:
                chunk = policy.act(policy.encode(shown), None, 1.0).actions[0].clamp(-1.0, 1.0)
            torch.testing.assert_close(action, chunk[step % 3], rtol=0, atol=1e-4)
            shown = env.step_chunk(action[None, None]).observation


def test_a_policy_is_exported_in_the_precision_of_its_training(tmp_path: Path, monkeypatch) -> None:
    folder, used, computed_in = shutil.copytree(clone(tiny()), tmp_path / "low"), [], export.computed_in
    conditions = json.loads((folder / "evaluation.json").read_text())
    (folder / "evaluation.json").write_text(json.dumps(conditions | {"precision": "bfloat16"}))
    monkeypatch.setattr(export, "computed_in", lambda given, *rest: used.append(given) or computed_in(given, *rest))
    run = [f"checkpoint={folder}", "policy=checkpoint", "num_episodes=1", "successes_only=false"]
    export_dataset(asked(tmp_path / "set", *run), silent)
    assert used == [Precision.bfloat16]


def test_nothing_solved_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = clone(tiny())
    config = asked(tmp_path / "x", f"checkpoint={folder}", "policy=checkpoint", "num_episodes=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_acting", lambda *args: lambda step, shown: torch.zeros(16, 2))
        with pytest.raises(
            SimulatorError, match=r"none of 4 episodes .* use more num_episodes, a better policy, or succ"
        ):
            export_dataset(config, silent)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("overrides", "out", "error", "words"),
    [
        (["env.cameras=[]"], "new", ConfigError, "a dataset holds images: name cameras"),
        ([], "old", ConfigError, "old', which is there already: give another name"),
        (["policy=checkpoint", "checkpoint=/nowhere"], "new", CheckpointError, "there is no /nowhere/config.json"),
        (
            ["env=maniskill", "env.task=PokeCube-v1", "env.chunk=5", "env.horizon=50", "env.chunks_per_rollout=10"],
            "new",
            ConfigError,
            "policy is 'expert', but .*PokeCube-v1.*: give checkpoint=<dir>",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_episode(tmp_path: Path, overrides, out, error, words) -> None:
    (tmp_path / "old/meta").mkdir(parents=True)
    with pytest.raises(error, match=words):
        export_dataset(asked(tmp_path / out, *overrides), lambda *progress: pytest.fail("an episode was run"))
