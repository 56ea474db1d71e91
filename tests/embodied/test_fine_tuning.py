"""Supervised fine-tuning: what is learned, what is held out, what is kept, and how a run resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recordings import point_episodes, write_recording
from runs import SFT, TINY, clone, learned, metric_rows, tiny, train, trainer_of

from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner, fine_tuning_stage
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.sources import DemonstrationSource, Kind, sources_of
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError
from rlinf_embodied.runtime.host import StepContext, solo_context

SHORTEST = ("eval.num_episodes=2", "eval.num_envs=2", "algorithm.epochs=2", "algorithm.head_epochs=2")


def small(data: object, *overrides: str) -> TrainConfig:
    """Returns the config of a run of four epochs."""
    return tiny(*SFT, f"data={data}", *overrides)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "demos.h5", point_episodes(tiny().env, 24))


# ----------------------------------------------------------------------------------------------------------- held out
def test_a_share_of_all_episodes_is_held_out_and_something_of_every_block_is_learned_from() -> None:
    def parts(*numbers: int, share: float = 0.25) -> list[list[bool]]:
        sources = tuple(DemonstrationSource(Kind.maniskill, n) for n in numbers)
        stage = fine_tuning_stage(small("x.h5", f"algorithm.held_out={share}"), sources, "")
        found = [stage.episodes(block) for block in range(4)]
        assert [(k, n) for part in found for k, n, _ in part] == [
            (k, n) for k, m in enumerate(numbers) for n in range(m)
        ]
        assert max(map(len, found)) - min(map(len, found)) <= 1
        return [[out for *_, out in part] for part in found]

    assert [sum(part) for part in parts(20, 12)] == [2, 2, 2, 2]
    assert [sum(part) for part in parts(9)] == [0, 1, 0, 1]
    assert [sum(part) for part in parts(12, share=0.01)] == [0, 0, 0, 1]
    assert [sum(part) for part in parts(4)] == [0, 0, 0, 0]
    assert not any(any(part) for part in parts(41, share=0.0))


@pytest.mark.slow
# ------------------------------------------------------------------------------------------------------------- a run
def test_a_run_learns_and_leaves_a_policy_that_another_continues(recording: Path, tmp_path: Path) -> None:
    summary = train(small(recording, f"run.dir={tmp_path / 'run'}"), draws=True)
    losses = [row["losses/held_out_loss"] for row in metric_rows(tmp_path / "run")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert {"success_once", "success_at_end"} <= set(summary["before"]) & set(summary["after"])
    latest = tmp_path / "run/checkpoints/latest"
    assert {"config.json", "model.safetensors", "evaluation.json"} <= {path.name for path in latest.iterdir()}
    more = [f"warm_start.checkpoint={latest}", "algorithm.epochs=0", "algorithm.head_epochs=1", "run.num_iterations=1"]
    train(small(recording, f"run.dir={tmp_path / 'more'}", *more))
    assert metric_rows(tmp_path / "more")[0]["losses/held_out_loss"] < losses[0]
    folders = (latest, tmp_path / "more/checkpoints/latest")
    first, second = ((folder / "dataset_statistics.json").read_text() for folder in folders)
    assert first == second


def test_without_files_the_warm_starts_demonstrations_are_learned_from(tmp_path: Path) -> None:
    short = ["algorithm.head_epochs=1", "run.num_iterations=2", "warm_start.num_demos=8", f"run.dir={tmp_path}"]
    train(tiny(*SFT, *short))
    assert metric_rows(tmp_path)[-1]["losses/held_out_loss"] > 0


def test_files_of_both_kinds_are_learned_from_alike_by_every_number_of_workers(recording: Path, tmp_path: Path) -> None:
    export_dataset(
        compose_export(
            [f"{k}={v}" for k, v in TINY.items() if k.startswith("env")]
            + [*("policy=expert", "num_episodes=6", f"out={tmp_path / 'set'}")]
        ),
        lambda *_: None,
    )
    config = small(f"{recording},{tmp_path / 'set'}", "policy.critic=observation", "algorithm.augment=[hue,crop]")
    first, second = (learned(config, n) for n in (1, 3))
    assert first == second
    assert first[1]["losses/held_out_loss"] > 0
    assert learned(small(recording), 1)[0] != first[0]
    turned = ["policy.critic=observation", "warm_start.convert_actions=[1:signed:signed_closed]"]
    (plain,), (other,) = (sources_of(small(tmp_path / "set", *words)) for words in (turned[:1], turned))
    assert np.array_equal(plain.open().columns["action"] * [1, -1], other.open().columns["action"])
    assert plain.digest != other.digest
    with pytest.raises(ConfigError, match=r"warm_start.convert_actions is .* vectors of LeRobot and RLDS"):
        sources_of(small(recording, *turned))


def test_an_epoch_draws_from_weighted_sources_in_their_proportions(recording: Path, tmp_path: Path) -> None:
    more = write_recording(tmp_path / "more.h5", point_episodes(tiny().env, 8, first_seed=500))
    config = small(f"{recording}:3,{more}:1.0", "algorithm.held_out=0")
    assert [source.weight for source in sources_of(config)] == [3.0, 1.0]
    first, second = (learned(config, n) for n in (1, 3))
    assert first == second
    assert learned(small(f"{recording},{more}"), 1)[0] != first[0]
    stage = FineTuningLearner(fine_tuning_stage(config, sources_of(config), str(clone(config))))
    stage.setup(solo_context(range(4)))
    for number in range(stage.open_sources(StepContext(0))):
        stage.collect(StepContext(number))
    stage.prepare(StepContext(0))
    sizes = {block: part.lengths for block, part in stage._data.items()}
    whole, counts = sum(sum(part.values()) for part in sizes.values()), [0, 0]
    orders = stage._made._mixture((0, "test", 3), stage._data)
    for block, order in orders.items():
        for source, rows in enumerate((order < sizes[block].get(0, 0), order >= sizes[block].get(0, 0))):
            counts[source] += int(rows.sum())
            drawn = np.bincount(order[rows])
            assert len(order[rows]) == 0 or drawn[drawn > 0].max() - drawn[drawn > 0].min() <= 1
    assert counts == pytest.approx([0.75 * whole, 0.25 * whole], abs=4)
    assert (orders[0] != stage._made._mixture((0, "test", 4), stage._data)[0]).any()
    with pytest.raises(ConfigError, match=r"data is .*weights are for algorithm=sft, and all paths have a weight"):
        sources_of(small(f"{recording}:3,{more}"))


# ------------------------------------------------------------------------------------------------------------ resuming
def test_a_run_resumes_with_its_own_files_and_settings_only(recording: Path, tmp_path: Path) -> None:
    one = ["algorithm.epochs=0", "algorithm.head_epochs=1", "run.num_iterations=1"]
    config = small(recording, f"run.dir={tmp_path / 'run'}", *SHORTEST, *one)
    train(config)
    with pytest.raises(
        ConfigError, match=r"algorithm.head_lr is 0.5 here and 0.005 there.*warm_start.checkpoint=.* be"
    ):
        trainer_of(replace(config, algorithm=replace(config.algorithm, head_lr=0.5)))


# ------------------------------------------------------------------------------------------------------- bad input
def test_what_cannot_be_learned_from_is_refused_before_a_session_is_opened(recording: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for data, error, words in (
        (f"{recording},{tmp_path / 'none'}", ConfigError, r"data is '.*none', but there is nothing: give a trajectory"),
        (tmp_path, DataError, r"data is .*, but .*info.json cannot be read .*: give the folder of a LeRobot dataset"),
    ):
        with pytest.raises(error, match=words):
            trainer_of(small(data, f"run.dir={run}"))
    with pytest.raises(CheckpointError, match=r"warm_start.checkpoint is '/nowhere', but there is no"):
        trainer_of(small(recording, f"run.dir={run}", "warm_start.checkpoint=/nowhere"))
    assert not (run / "config.yaml").exists()


def test_actions_of_another_size_are_refused_before_anything_is_evaluated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(EmbodiedJob, "evaluation", lambda *_: pytest.fail("an evaluation was built"))
    path = write_recording(tmp_path / "three.h5", [(k, np.zeros((4, 3), np.float32)) for k in range(6)])
    with pytest.raises(
        DataError, match=r"data is '.*three.h5', whose actions have 3 dimensions, but .* have 2: set en"
    ):
        train(small(path, f"run.dir={tmp_path / 'run'}"))
