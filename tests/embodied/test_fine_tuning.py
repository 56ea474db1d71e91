"""Supervised fine-tuning from files: what is learned, what is held out, what is kept, and how a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recordings import point_episodes, write_recording
from runs import TINY, metric_rows

from rlinf_embodied.compose import compose_sft
from rlinf_embodied.config import ImitationConfig
from rlinf_embodied.embodied.imitation_job import ImitationJob
from rlinf_embodied.embodied.imitation_stage import ImitationStageConfig
from rlinf_embodied.embodied.warm_start_source import Kind, Source
from rlinf_embodied.training.trainer import Trainer

OF_TRAINING = ("algorithm.", "warm_start.", "run.num_iterations", "env.num_envs", "env.block_size")
SHORT = {"sft.epochs": 1, "sft.head_epochs": 3, "sft.head_lr": 5e-3, "sft.head_batch_size": 16, "checkpoint.every": 1}


def small(data: object, *overrides: str) -> ImitationConfig:
    """Returns the config of a run of four epochs."""
    given = dict(text.split("=", 1) for text in overrides)
    shared = {key: value for key, value in TINY.items() if not key.startswith(OF_TRAINING)}
    return compose_sft([f"{key}={value}" for key, value in (shared | SHORT | {"data": data} | given).items()])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "demos.h5", point_episodes(small("x.h5").env, 24))


def fine_tune(config: ImitationConfig) -> dict:
    assert Trainer(ImitationJob(config)).run() == 0
    return json.loads((Path(config.run.dir or "") / "summary.json").read_text())


# ----------------------------------------------------------------------------------------------------------- held out
def test_a_share_of_every_block_is_held_out_and_something_is_always_learned_from() -> None:
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
    assert [sum(part) for part in parts(8)] == [1, 1, 1, 1]
    assert [sum(part) for part in parts(4)] == [0, 0, 0, 0]
    assert not any(any(part) for part in parts(40, share=0.0))


# ------------------------------------------------------------------------------------------------------------- a run
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
