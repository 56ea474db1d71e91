"""docs/own_policy.md does what it says: its policies train, are saved and read again, on more than one env."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from runs import tiny, train

from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.embodied.evaluate import evaluate_command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments/examples"
PAGE = (ROOT / "docs/own_policy.md").read_text()
TRAININGS = re.findall(r"^python experiments/train_vla\.py (policy=experiments.*)$", PAGE, re.MULTILINE)
SMALL = ["env.num_envs=4", "env.block_size=2", "env.horizon=10", "env.chunks_per_rollout=10", "run.num_iterations=2"]
SMALL += ["eval.num_episodes=2", "eval.num_envs=2", "policy.options.width=8", "algorithm.num_minibatches=2"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def importable(tmp_path, monkeypatch) -> Path:
    """What PYTHONPATH does for a command."""
    (tmp_path / "my_policy.py").write_text(blocks("python")[1].removeprefix("# my_policy.py\n"))
    for folder in (EXAMPLE, tmp_path):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    monkeypatch.chdir(ROOT)
    return tmp_path


def overrides(task: str, folder: Path) -> list[str]:
    """Returns the page's command for a task, with short episodes of few rows."""
    (printed,) = [text for text in TRAININGS if task in text]
    return [*(text for text in printed.split() if not text.startswith("run.dir=")), *SMALL, f"run.dir={folder}"]


def evaluated(run: Path, *more: str) -> dict:
    chosen = [f"checkpoint={run}/checkpoints/latest", "eval.num_episodes=2", "eval.num_envs=2", "cluster=serial"]
    evaluate_command(compose_evaluate([*chosen, f"run.dir={run}/eval", *more]))
    return json.loads((run / "eval/eval_info.json").read_text())


def test_the_page_shows_the_files() -> None:
    assert blocks("python")[0] == (EXAMPLE / "own_policy.py").read_text()
    assert blocks("yaml")[0] == (EXAMPLE / "own_policy.yaml").read_text()
    assert len((EXAMPLE / "own_policy.py").read_text().splitlines()) <= 100


def test_the_example_trains_on_the_env_of_the_docs_and_is_evaluated(importable) -> None:
    run = importable / "run"
    assert train(compose_train([*overrides("own_env", run), "cluster=serial"]))["iterations"] == 2
    saved = json.loads((run / "checkpoints/latest/config.json").read_text())
    assert (saved["architectures"], saved["policy"]["options"]) == (["ProprioPolicy"], {"num_bins": 11, "width": 8})
    assert evaluated(run)["env"]["task"] == "Pusher-v5"


@pytest.mark.slow
@pytest.mark.sim
def test_the_example_trains_on_maniskill_and_is_filmed(importable) -> None:
    run = importable / "pick"
    small = ["cluster=serial", "eval.record_video=false", "run.num_iterations=1"]
    assert train(compose_train([*overrides("maniskill_pick", run), *small]))["iterations"] == 1
    evaluated(run, "eval.num_episodes=1", "eval.num_envs=1", "eval.video_size=32")
    assert list((run / "eval/videos").rglob("*.mp4"))


def test_the_pages_other_network_trains(importable) -> None:
    words = ["policy=state", "policy._target_=my_policy.ReluPolicy", "algorithm=ppo_dense"]
    small = ["env.chunk=4", "env.block_size=4", "run.num_iterations=1", "eval.num_episodes=2"]
    assert train(tiny(*words, *small, f"run.dir={importable / 'run'}"))["iterations"] == 1
    saved = json.loads((importable / "run/checkpoints/latest/config.json").read_text())
    assert saved["architectures"] == ["ReluPolicy"]
