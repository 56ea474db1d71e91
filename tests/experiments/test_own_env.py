"""docs/own_env.md does what it says: its example trains and is evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import train

from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.job import EmbodiedJob

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments/examples"
PAGE = (ROOT / "docs/own_env.md").read_text()
TRAINING = re.search(r"^python experiments/train_vla\.py (.*own_env.*)$", PAGE, re.MULTILINE)
SMALL = ["env.num_envs=4", "env.block_size=2", "env.horizon=10", "env.chunks_per_rollout=10", "run.num_iterations=1"]
SMALL += ["eval.num_episodes=2", "eval.num_envs=2", "policy.options.hidden_size=16", "algorithm.num_minibatches=2"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def importable(tmp_path, monkeypatch) -> Path:
    """What PYTHONPATH does for a command."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.chdir(ROOT)
    return tmp_path


def overrides(folder: Path) -> list[str]:
    """Returns the page's command, with short episodes of few rows."""
    assert TRAINING is not None
    printed = [text for text in TRAINING[1].split() if not text.startswith("run.dir=")]
    return [*printed, *SMALL, f"run.dir={folder}"]


def test_the_page_shows_the_files() -> None:
    assert blocks("python")[0] == (EXAMPLE / "own_env.py").read_text()
    assert blocks("yaml")[0] == (EXAMPLE / "own_env.yaml").read_text()
    assert len((EXAMPLE / "own_env.py").read_text().splitlines()) <= 65


def test_the_example_trains_from_nothing_and_is_evaluated(importable, capsys) -> None:
    run = importable / "run"
    config = compose_train([*overrides(run), "cluster=serial"])
    EmbodiedJob(config).require_checkpoint(None)
    assert train(config)["iterations"] == 1
    out = capsys.readouterr().out
    assert "reward   what the task gives for each step, and 5 more in the last step of an episode" in out
    assert "videos   none, the env cannot be filmed" in out
    chosen = [f"checkpoint={run}/checkpoints/latest", "eval.num_episodes=2", "cluster=serial", f"run.dir={run}/eval"]
    evaluate_command(compose_evaluate(chosen))
    info = json.loads((run / "eval/eval_info.json").read_text())
    assert (info["env"]["task"], info["episode_len"]) == ("Pusher-v5", 10)
    assert "videos in" not in capsys.readouterr().out


@pytest.mark.ray
def test_workers_find_the_example(importable, ray_cluster) -> None:
    run = importable / "workers"
    config = compose_train([*overrides(run), "cluster.num_devices=2", "plan=collocated"])
    assert train(config)["iterations"] == 1
