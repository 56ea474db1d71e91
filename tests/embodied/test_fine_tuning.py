"""Supervised fine-tuning from files: what is learned, what is held out, what is kept, and how a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvla_folders
import pytest
from recordings import point_episodes, write_recording
from runs import TINY, cluster, metric_rows, tiny_overrides, train
from training_faults import lost, once

from policies.openvla.policy import OpenVLAPolicy
from rlinf_embodied.compose import compose_export, compose_sft, compose_train
from rlinf_embodied.config import ImitationConfig
from rlinf_embodied.embodied.cloning import HeldOut
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.imitation_job import ImitationJob
from rlinf_embodied.embodied.imitation_stage import ImitationStage, ImitationStageConfig
from rlinf_embodied.embodied.warm_start_source import Kind, Source
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.trainer import Trainer

OF_TRAINING = ("algorithm.", "warm_start.", "run.num_iterations", "env.num_envs", "env.block_size")
SHAPES = tuple(key for key in TINY if key.startswith("policy."))  # of the tiny VLA
SHORT = {"sft.epochs": 1, "sft.head_epochs": 3, "sft.head_lr": 5e-3, "sft.head_batch_size": 16, "checkpoint.every": 1}


def small(data: object, *overrides: str) -> ImitationConfig:
    """Returns the config of a run of four epochs."""
    return compose_sft(overrides_of(data, *overrides))


def overrides_of(data: object, *overrides: str) -> list[str]:
    """Returns its command line; each key is given once, so `overrides` win."""
    given = dict(text.split("=", 1) for text in overrides)
    shared = {key: value for key, value in TINY.items() if not key.startswith(OF_TRAINING)}
    return [f"{key}={value}" for key, value in (shared | SHORT | {"data": data} | given).items()]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "demos.h5", point_episodes(small("x.h5").env, 24))


def fine_tune(config: ImitationConfig) -> dict:
    assert Trainer(ImitationJob(config)).run() == 0
    return json.loads((Path(config.run.dir or "") / "summary.json").read_text())


# ----------------------------------------------------------------------------------------------------------- held out
def test_a_share_of_all_episodes_is_held_out_and_something_of_every_block_is_learned_from() -> None:
    def parts(*numbers: int, share: float = 0.25) -> list[list[bool]]:
        sources = tuple(Source(Kind.maniskill, str(n), "", n) for n in numbers)
        config = small("x.h5", f"sft.held_out={share}")
        stage = ImitationStageConfig(config.env, config.policy, config.sft, 0, sources, "")
        found = [stage.episodes(block) for block in range(4)]
        assert [(k, n) for part in found for k, n, _ in part] == [
            (k, n) for k, m in enumerate(numbers) for n in range(m)
        ]
        return [[out for *_, out in part] for part in found]

    assert [sum(part) for part in parts(20, 12)] == [2, 2, 2, 2]
    assert [sum(part) for part in parts(8)] == [0, 1, 0, 1]
    assert [sum(part) for part in parts(12, share=0.01)] == [0, 0, 0, 1]
    assert [sum(part) for part in parts(4)] == [0, 0, 0, 0]
    assert not any(any(part) for part in parts(40, share=0.0))


# ------------------------------------------------------------------------------------------------------------- a run
def test_a_published_openvla_folder_is_fine_tuned_and_then_trained(recording: Path, tmp_path: Path) -> None:
    published = openvla_folders.write_published(tmp_path / "published", action=2)
    openvla = ["policy=openvla_oft", "policy.options.prompt_length=24", "policy.options.lora.rank=4"]
    own = [*openvla, f"sft.checkpoint={published}", f"run.dir={tmp_path / 'sft'}", "sft.head_epochs=1"]
    given = [text for text in overrides_of(recording, *own) if not text.startswith(SHAPES)]
    assert fine_tune(compose_sft(given))["best_check"]["iteration"] >= 1
    latest = tmp_path / "sft/checkpoints/latest"
    scale = OpenVLAPolicy.from_folder(latest).module.privileged_scale
    assert scale.std.std() > 0  # of what random actions see
    follow = [f"warm_start.checkpoint={latest}", f"run.dir={tmp_path / 'rl'}", "run.num_iterations=1"]
    small_run = [text for text in tiny_overrides() if not text.startswith(("policy.", "warm_start.", "run.num"))]
    assert train(compose_train([*small_run, *openvla, *follow, "algorithm.ratio_tolerance=1e-3"]))["iterations"] == 1


def test_a_run_learns_and_leaves_a_policy_with_the_lowest_held_out_loss(recording: Path, tmp_path: Path) -> None:
    summary = fine_tune(small(recording, f"run.dir={tmp_path / 'run'}"))
    rows = metric_rows(tmp_path / "run")
    losses = [row["sft/held_out_loss"] for row in rows]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert summary["held_out_loss"] == min(losses)
    assert summary["best_check"]["iteration"] == 1 + losses.index(min(losses))
    assert {"success_rate_before", "success_rate_after", "success_at_end_after"} <= set(summary)
    latest = tmp_path / "run/checkpoints/latest"
    assert {"config.json", "model.safetensors", "evaluation.json"} <= {path.name for path in latest.iterdir()}
    further = fine_tune(
        small(
            recording, f"run.dir={tmp_path / 'more'}", f"sft.checkpoint={latest}", "sft.epochs=0", "sft.head_epochs=1"
        )
    )
    assert further["held_out_loss"] <= summary["held_out_loss"]
    statistics = [
        (folder / "dataset_statistics.json").read_text() for folder in (latest, tmp_path / "more/checkpoints/latest")
    ]
    assert statistics[0] == statistics[1]


def learned(config: ImitationConfig, folder: Path, devices: int) -> tuple[str, HeldOut]:
    """Makes an epoch in so many workers; returns the digest of the weights and how well others are imitated."""
    job, session, places = ImitationJob(config), SerialSession(), cluster(devices)
    start = job.starting_policy(session, places, lambda *_: None, folder)
    executor = Executor.on_all_devices(job.workflow(str(start)), session, places)
    job.prepare(executor, lambda *_: None)
    _, metrics = job.run_iteration(executor, Progress())
    (digest,) = set(executor.call("sft", "weights_digest", StepContext(1)))
    found = executor.call("sft", "held_out", StepContext(1))
    assert all(answer == found[0] for answer in found)
    assert metrics["sft/held_out_loss"] == found[0].loss
    return digest, found[0]


def test_files_of_both_kinds_are_learned_from_alike_by_every_number_of_workers(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    export_dataset(
        compose_export(
            [f"{k}={v}" for k, v in TINY.items() if k.startswith("env")]
            + [*("policy=expert", "num_episodes=6", f"out={tmp_path / 'set'}")]
        ),
        lambda *_: None,
    )
    config = small(f"{recording},{tmp_path / 'set'}", "sft.epochs=1", "sft.head_epochs=0", "policy.critic=observation")
    first, second = (learned(config, tmp_path / str(n), n) for n in (1, 3))
    assert first == second
    assert first[1].num_chunks > 0
    alone = learned(small(recording, "sft.epochs=1", "sft.head_epochs=0"), tmp_path / "alone", 1)
    assert alone[0] != first[0]


# ------------------------------------------------------------------------------------------------------- going on
SHORTEST = ("eval.num_episodes=2", "eval.num_envs=2", "sft.head_epochs=2", "sft.epochs=2", "checkpoint.keep=9")


def untimed(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != ImitationJob.speed} for row in metric_rows(folder)]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_weights_in_either_phase(
    recording: Path, tmp_path: Path, monkeypatch
) -> None:
    straight = fine_tune(small(recording, f"run.dir={tmp_path / 'straight'}", *SHORTEST))
    run_iteration = ImitationJob.run_iteration
    for died_in in (1, 3):  # the second epoch of each phase

        def die(self, executor, progress, at=died_in):
            if progress.iteration == at:
                raise KeyboardInterrupt
            return run_iteration(self, executor, progress)

        config = small(recording, f"run.dir={tmp_path / str(died_in)}", *SHORTEST)
        with monkeypatch.context() as patch:
            patch.setattr(ImitationJob, "run_iteration", die)
            with pytest.raises(KeyboardInterrupt):
                Trainer(ImitationJob(config)).run()
        assert fine_tune(config)["weights_sha256"] == straight["weights_sha256"]
        assert untimed(tmp_path / str(died_in)) == untimed(tmp_path / "straight")


@pytest.mark.parametrize(
    "call", [pytest.param(0, id="whole policy"), pytest.param(2, id="head", marks=pytest.mark.slow)]
)
def test_an_epoch_in_which_a_worker_is_lost_is_made_again(recording: Path, tmp_path: Path, monkeypatch, call) -> None:
    expected = fine_tune(small(recording, f"run.dir={tmp_path}/straight"))
    calls = once(monkeypatch, ImitationStage, "run", call, lost(), after=True)
    found = fine_tune(small(recording, f"run.dir={tmp_path}/disturbed"))
    assert len(calls) == 5
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["held_out_loss"] == expected["held_out_loss"]


def test_a_run_goes_on_with_its_own_files_and_settings_only(recording: Path, tmp_path: Path) -> None:
    config = small(recording, f"run.dir={tmp_path / 'run'}", *SHORTEST, "sft.epochs=0", "sft.head_epochs=1")
    fine_tune(config)
    with pytest.raises(ConfigError, match=r"sft.head_lr is 0.5 here and 0.005 there.*sft.checkpoint=.* begins with"):
        Trainer(ImitationJob(replace(config, sft=replace(config.sft, head_lr=0.5))))
    write_recording(recording, point_episodes(config.env, 24, first_seed=500))
    with pytest.raises(CheckpointError, match=r"data is .*, but what it holds is not what .* has learned from"):
        Trainer(ImitationJob(config))


# ------------------------------------------------------------------------------------------------------- bad input
def refused(config: ImitationConfig, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Trainer(ImitationJob(config))
    assert not (Path(config.run.dir or "") / "config.yaml").exists()


def test_what_cannot_be_learned_from_is_refused_before_a_session_is_opened(recording: Path, tmp_path: Path) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no demonstrations")
    whole = recording.read_bytes()
    recording.write_bytes(whole[: len(whole) // 2])
    refused(small(recording, run), DataError, r"data is '.*demos.h5', but it is no trajectory file .*: give a file")
    recording.write_bytes(whole)
    for data, overrides, error, words in (
        (tmp_path / "none.h5", [], ConfigError, r"data is '.*none.h5', but there is nothing: give a trajectory file"),
        (tmp_path / "notes.txt", [], DataError, r"data is '.*notes.txt', but a file is known by its ending .h5: give"),
        (tmp_path / "empty", [], DataError, r"data is '.*empty', but .*info.json cannot be read .*: give the folder"),
        (tmp_path, [], ConfigError, r"data is .*, a folder with demos.h5: give the file, .*/demos.h5"),
        (f"{recording},{tmp_path / 'none'}", [], ConfigError, r"data is '.*none', but there is nothing"),
        (
            recording,
            ["env.task=Other-v0"],
            ConfigError,
            r"recorded with task 'PointReach-v0', but env.task is 'Other-v0'",
        ),
        (
            recording,
            ["env.control_mode=pd_joint_pos"],
            ConfigError,
            r"env.control_mode is 'pd_joint_pos': set env.cont",
        ),
        (recording, ["sft.checkpoint=/nowhere"], CheckpointError, r"sft.checkpoint is '/nowhere', but there is no"),
    ):
        refused(small(data, run, *overrides), error, words)
    wrong = [(k, np.full((4, 2), np.nan, np.float32)) for k in range(6)]
    refused(small(write_recording(tmp_path / "nan.h5", wrong), run), DataError, r"action 0 of step 0 of traj_0 is nan")


def test_a_dataset_is_looked_through_before_a_session_is_opened(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from rlinf_embodied.data.lerobot import LeRobotEpisode
    from rlinf_embodied.data.lerobot_writer import write_dataset

    def dataset(name: str, size: int = 16, action: float = 0.5, video: bool = False) -> Path:
        images = {"base_camera": np.zeros((3, size, size, 3), np.uint8)}
        actions, state = np.full((3, 2), action, np.float32), np.zeros((3, 4), np.float32)
        episodes = [LeRobotEpisode("move the point to the goal", actions, state, images)] * 5
        write_dataset(tmp_path / name, episodes, 20, "point", video)
        return tmp_path / name

    run = f"run.dir={tmp_path / 'run'}"
    refused(
        small(dataset("nan", action=np.nan), run), DataError, r"data is '.*nan', but action 0 of step 0 of episode 0"
    )
    refused(
        small(dataset("large", size=32), run), ConfigError, r"env.obs_size is 16, but .* is 32 x 32: set env.obs_size"
    )
    filmed = dataset("filmed", video=True)
    next(filmed.rglob("*.mp4")).unlink()
    refused(small(filmed, run), DataError, r"data is '.*filmed', but .*file-000.mp4 is missing: copy the dataset anew")
    cut = next(dataset("cut").glob("data/*/*.parquet"))
    cut.write_bytes(cut.read_bytes()[:200])
    refused(small(tmp_path / "cut", run), DataError, r"data is '.*cut', but .*file-000.parquet cannot be read")


def test_actions_of_another_size_are_refused_before_anything_is_evaluated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ImitationJob, "evaluation", lambda *_: pytest.fail("an evaluation was built"))
    three = [(k, np.zeros((4, 3), np.float32)) for k in range(6)]
    path = write_recording(tmp_path / "three.h5", three)
    with pytest.raises(
        DataError, match=r"data is '.*three.h5', whose actions have 3 dimensions, but .* have 2: set env.rob"
    ):
        Trainer(ImitationJob(small(path, f"run.dir={tmp_path / 'run'}"))).run()
