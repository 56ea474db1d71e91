"""Demonstrations from files and from a teacher: replayed or read, cloned like the expert's, refused if they misfit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recordings import point_episodes, record_maniskill, write_recording
from runs import cluster, tiny, train

from policies.state_policy import StatePolicy
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.embodied.recorded import Replay
from rlinf_embodied.embodied.warm_start import cache_folder, starting_policy, warm_start
from rlinf_embodied.embodied.warm_start_source import FILES, require_source, source_of
from rlinf_embodied.embodied.warm_start_stage import (
    NUM_DATA_BLOCKS,
    WarmStartStage,
    WarmStartStageConfig,
    for_demonstrations,
)
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError, SimulatorError
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import stacked

STATE = ["policy=state", "algorithm=ppo_dense", "env.cameras=[]", "env.chunk=1", "env.chunks_per_rollout=12"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path: Path) -> Callable[[str], None]:
    def use(name: str) -> None:
        monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path / name))

    use("cache")
    return use


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Twenty solved episodes, and one whose actions lead nowhere."""
    solved = point_episodes(tiny().env, 20)
    return write_recording(tmp_path / "demos.h5", [*solved, (500, np.full((6, 2), 0.01, np.float32))])


def stage_config(config: TrainConfig) -> WarmStartStageConfig:
    source = source_of(config.warm_start)
    return WarmStartStageConfig((config.env,), config.policy, config.warm_start, config.run.seed, source)


def from_files(path: Path, *overrides: str) -> TrainConfig:
    return tiny(f"warm_start.demonstrations={path}", *overrides)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def collected(config: TrainConfig) -> tuple[WarmStartStage, dict[str, int]]:
    """Runs all rounds in one worker; returns the stage and the sums of its answers."""
    stage = WarmStartStage(stage_config(config))
    answers = [stage.collect(StepContext(k)) for k in range(stage.setup(solo_context(range(NUM_DATA_BLOCKS))))]
    return stage, {name: sum(answer[name] for answer in answers) for name in answers[0]}


def checked_and_collected(config: TrainConfig) -> None:
    require_source(config)
    collected(config)


# ------------------------------------------------------------------------------------------------- ManiSkill recordings
def test_a_recording_is_replayed_chunk_by_chunk_and_what_does_not_solve_the_task_is_left_out(recording: Path) -> None:
    config = from_files(recording)
    episodes = point_episodes(config.env, 20)
    stage, counts = collected(config)
    lengths = [-(-len(actions) // config.env.chunk) for _, actions in episodes]
    assert counts == {"episodes": 21, "solved": 20, "chunks": sum(lengths)}
    found = [part for block in range(NUM_DATA_BLOCKS) for part in stage._data[block]]
    assert [len(part) for part in found] == lengths
    for part, (seed, actions) in zip(found, episodes, strict=True):
        env = make_env(config.env, 1, "cpu")
        first = env.reset([seed])
        assert torch.equal(part.observation.proprio[:1], first.proprio)
        assert torch.equal(stacked(part.observation)[:1], stacked(first))
        flat = part.actions.flatten(0, 1).numpy()
        assert np.array_equal(flat[: len(actions)], actions)
        assert (flat[len(actions) :] == actions[-1]).all()  # the last action fills its chunk


def test_a_clone_of_files_has_the_same_bytes_for_every_number_of_workers(recording: Path, cache) -> None:
    config = stage_config(from_files(recording))
    found = []
    for devices in (1, 2, 4):
        cache(f"of {devices}")
        found.append(files(warm_start(config, SerialSession(), cluster(devices), lambda *progress: None)))
    assert found[0] == found[1] == found[2]


def test_the_cache_knows_a_file_by_what_it_holds(recording: Path, tmp_path: Path) -> None:
    def where(path: Path) -> Path:
        return cache_folder(stage_config(from_files(path)), kind="cpu")

    other = write_recording(tmp_path / "elsewhere/other name.h5", point_episodes(tiny().env, 20))
    before = where(recording)
    assert before not in (cache_folder(stage_config(tiny()), kind="cpu"), where(other))
    write_recording(other, [*point_episodes(tiny().env, 20), (500, np.full((6, 2), 0.01, np.float32))])
    other.write_bytes(recording.read_bytes())
    assert where(other) == before
    recording.with_suffix(".json").write_text(recording.with_suffix(".json").read_text() + "\n")
    assert where(recording) != before


def test_clones_of_a_gpus_simulation_and_of_a_cpus_are_kept_apart() -> None:
    pick, batched = tiny("env=maniskill_pick"), tiny("env=maniskill_pick", "env.backend=batched")
    on_gpu, elsewhere = (cache_folder(stage_config(pick), kind) for kind in ("cuda", "npu"))
    assert on_gpu != elsewhere  # on a device that PhysX does not run on a CPU simulates
    assert cache_folder(stage_config(batched), "cuda") == cache_folder(stage_config(batched), "npu")


def test_a_whole_training_starts_from_a_recording(recording: Path, tmp_path: Path) -> None:
    summary = train(from_files(recording, f"run.dir={tmp_path / 'run'}", "run.num_iterations=1"))
    assert summary["before"]["num_episodes"] == 6


def test_a_recording_that_solves_nothing_says_what_to_check(tmp_path: Path) -> None:
    still = write_recording(tmp_path / "still.h5", [(k, np.full((6, 2), 0.01, np.float32)) for k in range(1, 9)])
    stage, counts = collected(from_files(still))
    assert counts["solved"] < 8
    with pytest.raises(SimulatorError, match=r"still.h5', but none of a block's episodes solves .* check env.robot"):
        stage.prepare(StepContext(0))


@pytest.mark.parametrize(
    ("change", "overrides", "error", "words"),
    [
        (
            {"task": "PushCube-v1"},
            [],
            ConfigError,
            "task 'PushCube-v1', but env.task is 'PointReach-v0': set env.",
        ),
        ({"control_mode": "pd_joint_pos"}, [], ConfigError, "but env.control_mode is 'pd_ee_delta_pose'.*replay_traj"),
        ({"bad": np.nan}, [], DataError, r"action 1 of step 2 of traj_3 is nan, .* \[-1, 1\]"),
        ({"bad": 1.5}, [], DataError, r"action 1 of step 2 of traj_3 is 1.5, .* normalised"),
        ({"number": 3}, [], DataError, "holds 3 episodes, .* record more"),
        ({"dims": 3}, [], DataError, r"whose actions have 3 dimensions, but those of the env have 2"),
        ({"steps": 13}, [], ConfigError, r"has episodes of up to 13 env steps, .*: set env.horizon=13"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(tmp_path: Path, change, overrides, error, words) -> None:
    number = change.pop("number", 6)
    episodes = [(k, np.full((change.get("steps", 4), change.get("dims", 2)), 0.1, np.float32)) for k in range(number)]
    if "bad" in change:
        episodes[3][1][2, 1] = change["bad"]
    kind = {name: value for name, value in change.items() if name in ("task", "control_mode")}
    config = from_files(write_recording(tmp_path / "demos.h5", episodes, **kind), *overrides)
    with pytest.raises(error, match=rf"(?s)warm_start.demonstrations.*{words}"):
        checked_and_collected(config)


def test_a_recording_is_known_by_the_name_of_a_link_to_it(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for suffix in (".h5", ".json"):
        recording.with_suffix(suffix).rename(tmp_path / f"blobs/sha{suffix[1]}")
        recording.with_suffix(suffix).symlink_to(tmp_path / f"blobs/sha{suffix[1]}")
    checked_and_collected(from_files(recording))


def test_a_path_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warm_start.demonstrations is '.*/no.h5', but there is nothing: give"):
        EmbodiedJob(from_files(tmp_path / "no.h5")).require_checkpoint(None)


# ------------------------------------------------------------------------------------------------------ LeRobot folders
def dataset(folder: Path, config: TrainConfig, **change) -> Path:
    """Writes what point_reach's expert does and sees, frame by frame."""
    pytest.importorskip("pyarrow")
    from rlinf_embodied.data.lerobot import LeRobotEpisode
    from rlinf_embodied.data.lerobot_writer import write_dataset

    env = make_env(for_demonstrations(replace(config.env, chunk=1)), 1, "cpu")
    episodes = []
    for seed, actions in point_episodes(config.env, 8):
        shown = [env.reset([seed])]
        for action in actions[:-1]:
            shown.append(env.step_chunk(torch.from_numpy(action)[None, None]).observation)
        state = torch.cat([o.proprio for o in shown]).numpy()
        images = torch.cat([stacked(o) for o in shown if o.images]).numpy()
        cameras = {name: images[:, k] for k, name in enumerate(config.env.cameras)}
        fields = {"actions": actions, "state": state, "images": cameras} | {k: v(actions) for k, v in change.items()}
        episodes.append(LeRobotEpisode("move the point to the goal", **fields))
    write_dataset(folder, episodes, fps=20, robot="point")
    return folder


def test_a_dataset_gives_the_same_demonstrations_as_the_replay_of_its_episodes(tmp_path: Path) -> None:
    config = tiny()
    recorded = write_recording(tmp_path / "demos.h5", point_episodes(config.env, 8))
    images, _ = collected(from_files(dataset(tmp_path / "set", config)))
    replayed, counts = collected(from_files(recorded))
    assert counts["solved"] == 8
    for block in range(NUM_DATA_BLOCKS):
        for ours, theirs in zip(images._data[block], replayed._data[block], strict=True):
            assert torch.equal(ours.actions, theirs.actions)
            assert torch.equal(stacked(ours.observation), stacked(theirs.observation))
            assert torch.equal(ours.observation.proprio, theirs.observation.proprio)
            assert ours.observation.instruction == theirs.observation.instruction
            assert ours.object_positions is None


def test_a_whole_training_starts_from_a_dataset(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", tiny())
    assert train(from_files(folder, f"run.dir={tmp_path / 'run'}", "run.num_iterations=1"))["iterations"] == 1


def test_a_dataset_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", tiny())
    for overrides, error, words in (
        (["env.cameras=[base_camera,wrist]"], ConfigError, r"env.cameras is .* images of base_camera: name cameras"),
        (["env.cameras=[]"], ConfigError, r"env.cameras is \[\], but"),
        (["env.obs_size=32"], ConfigError, r"env.obs_size is 32, .* is 16 x 16: set env.obs_size=16"),
        (
            ["env.instruction=go"],
            ConfigError,
            r"env.instruction is 'go', .* set env.instruction='move the point",
        ),
    ):
        with pytest.raises(error, match=words):
            checked_and_collected(from_files(folder, *overrides))
    for name, change, words in (
        ("nan", {"actions": lambda a: np.full_like(a, np.nan)}, r"action 0 of step 0 of episode 0 is nan"),
        ("wide", {"actions": lambda a: np.zeros((len(a), 3), np.float32)}, "whose action have 3 dimensions, .* have 2"),
        ("state", {"state": lambda a: np.zeros((len(a), 5), np.float32)}, "observation.state have 5 dimensions, .* 4"),
    ):
        with pytest.raises(DataError, match=words):
            collected(from_files(dataset(tmp_path / name, tiny(), **change)))


# -------------------------------------------------------------------------------------------------- teacher and student
class Oracle(StatePolicy):
    """A teacher that knows point_reach: the offset to the goal stands in the state, and the clock is not looked at."""

    def act(self, features, noise, temperature):
        output = super().act(features, noise, temperature)
        way = features["state"][:, 4:6] / 0.15
        return replace(output, actions=way.clamp(-1, 1)[:, None].expand_as(output.actions))


def teacher(folder: Path, config: TrainConfig) -> Path:
    env = make_env(config.env, 1, "cpu")
    policy = replace(config.policy, _target_=f"{__name__}.Oracle")
    save_policy(StatePolicy(policy, env.spec, 0), folder, config.env, policy)
    return folder


def test_a_teacher_shows_what_the_expert_would(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rlinf_embodied.embodied.policy_folder.load_target", lambda target: Oracle)
    folder = teacher(tmp_path / "teacher", tiny(*STATE))
    taught, counts = collected(tiny(f"warm_start.teacher={folder}"))
    shown, expected = collected(tiny())
    assert counts == expected
    for block in range(NUM_DATA_BLOCKS):
        for ours, theirs in zip(taught._data[block], shown._data[block], strict=True):
            assert torch.allclose(ours.actions, theirs.actions, atol=1e-6)


def test_a_new_state_policy_trains_without_any_image(tmp_path: Path) -> None:
    config = tiny(*STATE, "run.num_iterations=2", f"run.dir={tmp_path / 'run'}")
    summary = train(config)
    assert summary["iterations"] == 2
    latest = tmp_path / "run/checkpoints/latest"
    assert json.loads((latest / "evaluation.json").read_text())["fingerprint"]["cameras"] == []
    student = tiny(f"warm_start.teacher={latest}", "warm_start.num_demos=8")
    EmbodiedJob(student).require_checkpoint(None)
    _, counts = collected(student)
    assert counts["episodes"] == 8


def test_a_new_policy_is_a_function_of_the_seed_and_knows_the_scale_of_its_inputs(cache) -> None:
    def made(*overrides: str) -> dict[str, bytes]:
        config = tiny(*STATE, *overrides)
        return files(starting_policy(config, SerialSession(), cluster(1), lambda *progress: None))

    first = made()
    cache("another")
    assert made() == first
    assert made("run.seed=4")["model.safetensors"] != first["model.safetensors"]
    columns = json.loads(first["dataset_statistics.json"])["PointReach-v0"]["privileged"]
    assert all(0.1 <= std < 2 for std in columns["std"])


def test_a_policy_that_sees_may_start_from_nothing_too() -> None:
    config = tiny("warm_start.from_nothing=true")
    folder = starting_policy(config, SerialSession(), cluster(1), lambda *progress: None)
    assert {"vision", "proprio"} <= set(json.loads((folder / "dataset_statistics.json").read_text())["PointReach-v0"])


def test_a_teacher_that_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def refused(config: TrainConfig, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            EmbodiedJob(config).require_checkpoint(None)

    refused(tiny(f"warm_start.teacher={tmp_path}"), "warm_start.teacher is .*, but there is no .*config.json")
    folder = teacher(tmp_path / "teacher", tiny(*STATE))
    other = tiny(f"warm_start.teacher={folder}", "env.task=Other-v0")
    refused(other, "env.task=PointReach-v0, but env.task is Other-v0")
    seeing = starting_policy(tiny("warm_start.from_nothing=true"), SerialSession(), cluster(1), lambda *p: None)
    refused(tiny(f"warm_start.teacher={seeing}"), "sees base_camera, .* train one with policy=state")


# ------------------------------------------------------------------------------------------------------------ ManiSkill
@pytest.mark.slow
@pytest.mark.sim
def test_a_recording_of_stock_maniskill_replays_in_the_batched_simulator_with_our_cameras(tmp_path: Path) -> None:
    path = record_maniskill(tmp_path / "pick.h5", "PickCube-v1", range(5))
    pick = ["env=maniskill_pick", "env.chunk=5", "env.horizon=50", "env.chunks_per_rollout=10", "env.obs_size=16"]
    config = from_files(path, *pick)
    require_source(config)
    env = make_env(for_demonstrations(config.env), 5, "cpu")
    shown = Replay(str(path), FILES).demonstrate(env, range(5))
    env.close()
    assert all(part is not None for part in shown)
    for part in shown:
        assert stacked(part.observation).shape[1:] == (2, 16, 16, 3)
        assert stacked(part.observation).float().std() > 5  # something is seen


@pytest.mark.slow
@pytest.mark.sim
def test_without_cameras_maniskill_is_the_same_but_for_images() -> None:
    plain = ["env=maniskill_push", "env.chunk=5", "env.horizon=10", "env.chunks_per_rollout=2", "env.obs_size=16"]
    seeing, blind = (make_env(tiny(*plain, *more).env, 2, "cpu") for more in ([], ["env.cameras=[]"]))
    for env in (seeing, blind):
        env.reset([3, 4])
    actions = torch.linspace(-1, 1, 70).reshape(2, 5, 7)
    first, second = (env.step_chunk(actions).observation for env in (seeing, blind))
    assert not second.images
    assert torch.equal(first.privileged, second.privileged)
    assert torch.equal(first.proprio, second.proprio)
    assert isinstance(StatePolicy(tiny(*STATE).policy, blind.spec, 0), Policy)
    for env in (seeing, blind):
        env.close()
