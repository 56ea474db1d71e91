"""Episodes as datasets: both forms say the same, ManiSkill's tools read them, and wrong input costs no episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from runs import TINY, clone, tiny

from envs.point_reach import REACHED
from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import ExportConfig
from rlinf_embodied.data.maniskill_h5 import read_recording
from rlinf_embodied.embodied import export
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.embodied.recorded import open_recorded
from rlinf_embodied.embodied.warm_start_source import file_source
from rlinf_embodied.embodied.warm_start_stage import for_demonstrations
from rlinf_embodied.errors import CheckpointError, ConfigError, SimulatorError
from tests.observations import stacked

OF_ENV = {key: value for key, value in TINY.items() if key.startswith(("env", "run.seed"))}


def asked(out: Path, *overrides: str) -> ExportConfig:
    """Returns the config of an export of the expert's episodes in point_reach, unless `overrides` say otherwise."""
    given = dict(text.split("=", 1) for text in overrides)
    base = OF_ENV | {"policy": "expert", "out": out, "num_episodes": 20}
    return compose_export([f"{key}={value}" for key, value in (base | given).items()])


def read_names(file: h5py.File) -> list[str]:
    return [name for name in file if name.startswith("traj_")]


def silent(done: int, total: int) -> None:
    pass


def test_both_forms_are_cloned_alike(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    steps: list[tuple[int, int]] = []
    for out in (tmp_path / "demos.h5", tmp_path / "set"):
        found = export_dataset(asked(out), lambda done, total: steps.append((done, total)))
        assert (found.run, found.solved, found.written) == (20, 20, 20)
    assert steps == [(16, 20), (20, 20)] * 2
    env = make_env(for_demonstrations(tiny().env), 20, "cpu")
    read = [open_recorded(file_source(str(tmp_path / name), "data")) for name in ("demos.h5", "set")]
    for ours, theirs in zip(*(recorded.demonstrate(env, range(20)) for recorded in read), strict=True):
        assert torch.equal(ours.actions, theirs.actions)
        assert torch.equal(stacked(ours.observation), stacked(theirs.observation))


def test_states_are_those_of_the_simulator_before_each_action_and_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "demos.h5"
    config = asked(out, "num_episodes=3")
    export_dataset(config, silent)
    recording = read_recording(out, "data")
    env = make_env(for_demonstrations(replace(config.env, chunk=1)), 1, "cpu")
    with h5py.File(out) as file:
        for episode in recording.episodes:
            group = file[episode.name]
            points = group["env_states/actors/point"]
            assert len(points) == len(episode.actions) + 1
            assert group["success"][:].tolist() == [False] * (len(episode.actions) - 1) + [True]
            seen = [env.reset([episode.seed])]
            seen += [env.step_chunk(torch.from_numpy(action)[None, None]).observation for action in episode.actions]
            assert np.array_equal(points[:-1], np.stack([shown.proprio[0, :2] for shown in seen[:-1]]))
            goal = group["env_states/actors/goal"]
            assert np.linalg.norm(points[-1] - goal[-1]) < REACHED <= np.linalg.norm(points[-2] - goal[-2])


def test_episodes_are_written_until_the_task_has_stayed_solved(tmp_path: Path) -> None:
    config = asked(tmp_path / "demos.h5", "num_episodes=5", "env.hold_steps=3")
    export_dataset(config, silent)
    with h5py.File(config.out) as file:
        for name in read_names(file):
            success = file[name]["success"][:].tolist()
            assert success[-4:] == [False, True, True, True], "the last steps, and the first that solves it"
            assert file[name]["terminated"][:].tolist() == success


def test_a_checkpoint_acts_chunk_by_chunk_as_in_training_and_failures_are_written_on_demand(tmp_path: Path) -> None:
    folder = clone(tiny())
    run = [f"checkpoint={folder}", "policy=checkpoint"]
    every = export_dataset(asked(tmp_path / "all.h5", *run, "successes_only=false"), silent)
    solved = export_dataset(asked(tmp_path / "solved.h5", *run), silent)
    assert 0 < every.solved < every.run == every.written == 20
    assert (solved.solved, solved.written) == (every.solved, every.solved)
    described = json.loads((tmp_path / "all.json").read_text())
    assert sum(entry["success"] for entry in described["episodes"]) == every.solved
    assert described["env_info"]["max_episode_steps"] == 12
    failed = next(e for e in described["episodes"] if not e["success"])
    with h5py.File(tmp_path / "all.h5") as file:
        group = file[f"traj_{failed['episode_id']}"]
        assert (failed["elapsed_steps"], bool(group["truncated"][-1]), bool(group["terminated"][-1])) == (
            12,
            True,
            False,
        )


def test_a_checkpoint_predicts_again_after_the_steps_that_are_executed(tmp_path: Path) -> None:
    section = ["env.execute_steps=3"]  # of chunks of four
    folder = clone(tiny(*section))
    run = [f"checkpoint={folder}", "policy=checkpoint", "num_episodes=2", "successes_only=false", "greedy=true"]
    config = asked(tmp_path / "all.h5", *run, *section)
    export_dataset(config, silent)
    policy = load_policy(tiny().policy, str(folder), "cpu").policy
    env = make_env(replace(for_demonstrations(config.env), chunk=1), 1, "cpu")
    for episode in read_recording(tmp_path / "all.h5", "data").episodes:
        seen = env.reset([episode.seed])
        for step, action in enumerate(torch.from_numpy(episode.actions)):
            if step % 3 == 0:
                chunk = policy.act(policy.encode(seen), None, 1.0).actions[0].clamp(-1.0, 1.0)
            torch.testing.assert_close(action, chunk[step % 3], rtol=0, atol=1e-4)
            seen = env.step_chunk(action[None, None]).observation


def test_nothing_solved_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = clone(tiny())
    config = asked(tmp_path / "x.h5", f"checkpoint={folder}", "policy=checkpoint", "num_episodes=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_acting", lambda *args: lambda step, shown: torch.zeros(16, 2))
        with pytest.raises(
            SimulatorError, match=r"none of 4 episodes .* use more num_episodes, a better policy, or succ"
        ):
            export_dataset(config, silent)
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.parametrize(
    ("overrides", "out", "error", "words"),
    [
        (["env.cameras=[]"], "new", ConfigError, "a LeRobot folder holds images: name cameras"),
        ([], "old.h5", ConfigError, "old.h5', which is there already: give another name"),
        ([], "old", ConfigError, "old', which is there already"),
        (["policy=checkpoint", "checkpoint=/nowhere"], "new.h5", CheckpointError, "there is no /nowhere/config.json"),
        (
            ["env=maniskill", "env.task=PokeCube-v1", "env.chunk=5", "env.horizon=50", "env.chunks_per_rollout=10"],
            "new.h5",
            ConfigError,
            "policy is 'expert', but .*PokeCube-v1.*: give checkpoint=<dir>",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_episode(tmp_path: Path, overrides, out, error, words) -> None:
    (tmp_path / "old.h5").touch()
    (tmp_path / "old/meta").mkdir(parents=True)
    with pytest.raises(error, match=words):
        export_dataset(asked(tmp_path / out, *overrides), lambda *progress: pytest.fail("an episode was run"))


@pytest.mark.slow
@pytest.mark.sim
def test_maniskill_replays_a_file_of_ours_to_the_same_states_and_successes(tmp_path: Path) -> None:
    from mani_skill.trajectory.replay_trajectory import Args, main

    config = compose_export([f"out={tmp_path / 'push.h5'}", "policy=expert", "env=maniskill_push", "num_episodes=3"])
    assert export_dataset(config, silent).written == 3
    main(Args(traj_path=str(tmp_path / "push.h5"), save_traj=True, allow_failure=True))
    (theirs,) = set(tmp_path.glob("push.*.h5"))
    with h5py.File(tmp_path / "push.h5") as ours, h5py.File(theirs) as replayed:
        assert set(ours) == set(replayed) == {"traj_0", "traj_1", "traj_2"}
        for name in ours:
            assert np.array_equal(ours[name]["success"], replayed[name]["success"])
            paths: list[str] = []
            replayed[name].visititems(
                lambda path, item, into=paths: into.append(path) if isinstance(item, h5py.Dataset) else None
            )
            states = {path for path in paths if path.startswith("env_states/")}
            assert {"env_states/actors/cube", "env_states/articulations/panda_wristcam"} <= states
            for path in states:
                assert np.allclose(ours[name][path], replayed[name][path], atol=1e-5), path
