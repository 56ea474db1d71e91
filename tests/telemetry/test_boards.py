"""W&B gets the numbers, through a fake of its public interface and offline; what is not installed is named."""

from __future__ import annotations

import importlib.machinery
import json
import math
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch

from rlinf_embodied.config import RunConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.boards import Histogram, TensorBoard, Wandb, require_boards, start_boards
from rlinf_embodied.telemetry.metrics import MetricsWriter


@pytest.fixture
def wandb(monkeypatch) -> list[object]:
    """A wandb that keeps what it is told."""
    log: list[object] = []
    run = types.SimpleNamespace(log=lambda data, step: log.append((step, data)), finish=lambda: log.append("finished"))
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.__dict__.update(init=lambda **words: log.append(words) or run, Video=lambda path, format: Path(path))
    fake.__dict__.update(Histogram=lambda np_histogram: [part.tolist() for part in np_histogram])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return log


def test_a_run_has_the_boards_that_it_asks_for(tmp_path, wandb) -> None:
    require_boards(RunConfig(wandb=True))
    for asked, kinds in (({}, [TensorBoard]), ({"tensorboard": False}, []), ({"wandb": True}, [TensorBoard, Wandb])):
        assert [type(board) for board in start_boards(tmp_path, RunConfig(**asked), {})] == kinds


def test_weights_and_biases_gets_the_same_numbers_under_the_names_of_its_variables(tmp_path, wandb, monkeypatch):
    writer = MetricsWriter(tmp_path, [Wandb(tmp_path, {"seed": 1})])
    writer.write(5, 1, {"charts/SPS": 2.0, "losses/entropy": math.inf})
    writer.close()
    named = {"project": "rlinf_embodied", "name": tmp_path.name, "dir": str(tmp_path), "config": {"seed": 1}}
    assert wandb == [named, (5, {"charts/SPS": 2.0}), "finished"]
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setenv("WANDB_NAME", "n")
    Wandb(tmp_path, {})
    assert wandb[-1] == {"project": "p", "name": "n", "dir": str(tmp_path), "config": {}}


def test_weights_and_biases_gets_histograms_and_videos(tmp_path, wandb) -> None:
    (tmp_path / "Reach--seed=7--success=1.mp4").touch()
    counts, edges = torch.arange(40.0), [k / 20 - 1 for k in range(41)]
    writer = MetricsWriter(tmp_path, [Wandb(tmp_path, {})])
    writer.write(5, 1, {"rollout/action_0": pickle.loads(pickle.dumps(Histogram(counts.tolist(), 1.0)))})
    writer.show_videos(5, tmp_path)
    (_, shown), (_, filmed) = wandb[1:]
    assert shown == {"rollout/action_0": [counts.tolist(), pytest.approx(edges)]}
    assert filmed == {"videos/Reach--seed=7": tmp_path / "Reach--seed=7--success=1.mp4"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 1, "global_step": 5}


def test_weights_and_biases_works_offline(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    board = Wandb(tmp_path, {"seed": 1})
    board.log({"charts/SPS": 2.0}, 5)
    board.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert written.stat().st_size > 0


def test_a_board_that_is_not_installed_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run.wandb is True, but wandb is not installed: pip install"):
        require_boards(RunConfig(wandb=True))
