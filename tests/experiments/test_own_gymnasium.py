"""docs/gymnasium.md does what it says: its image env and HalfCheetah train from its commands and are evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import train

from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.embodied.evaluate import evaluate_command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments/examples"
PAGE = (ROOT / "docs/gymnasium.md").read_text()
COMMANDS = re.findall(r"^python experiments/train_vla\.py (.*)$", PAGE, re.MULTILINE)
SMALL = ["env.num_envs=4", "env.block_size=2", "algorithm.num_minibatches=2", "algorithm.epochs=1", "cluster=serial"]
SMALL += ["algorithm.value_epochs=1", "policy.options.hidden_size=16", "run.num_iterations=2", "eval.num_envs=2"]


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    """What PYTHONPATH does for a command."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.chdir(ROOT)


def trained(command: str, run: Path, *overrides: str) -> dict:
    """Returns the summary of the page's command, with few rows and iterations."""
    given = dict(text.split("=", 1) for text in [*command.split(), *SMALL, *overrides, f"run.dir={run}"])
    train(compose_train([f"{key}={value}" for key, value in given.items()]))
    return json.loads((run / "summary.json").read_text())


def evaluated(run: Path, *overrides: str) -> dict:
    given = [f"checkpoint={run}/checkpoints/latest", "eval.num_episodes=2", "cluster=serial", f"run.dir={run}/eval"]
    evaluate_command(compose_evaluate([*given, *overrides]))
    return json.loads((run / "eval/eval_info.json").read_text())


def test_the_page_shows_the_files() -> None:
    for language, name in (("python", "own_gymnasium.py"), ("yaml", "own_gymnasium.yaml")):
        assert re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0] == (EXAMPLE / name).read_text()
    assert len(COMMANDS) == 2


def test_the_image_env_trains_a_convolutional_policy_and_tells_success(tmp_path, capsys) -> None:
    summary = trained(COMMANDS[1], tmp_path / "run", "eval.num_episodes=2")
    assert 0 <= summary["after"]["success_once"] <= 1
    assert summary["after"]["return"] in (-1.0, 0.0, 1.0)
    info = evaluated(tmp_path / "run")
    assert info["episode_len"] == 9  # the env's own end, which is no time limit
    assert "success_once" in info
    assert "videos in" in capsys.readouterr().out  # the env draws itself


def test_a_task_without_success_shows_its_return_everywhere(tmp_path, capsys) -> None:
    run, short = tmp_path / "run", ["env.horizon=6", "env.chunks_per_rollout=4", "eval.num_episodes=3"]
    summary = trained(COMMANDS[0], run, *short, "eval.record_video=false")
    out = capsys.readouterr().out
    low, high = summary["after"]["return_interval"]
    assert low <= summary["after"]["return"] <= high
    assert not any("success" in key for key in summary)
    assert re.search(r"before RL return -?[\d.]+ \[.*\]; after return -?[\d.]+ \[", out)
    assert "success_once -" in out  # of an iteration: there is none
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("success" in key for row in rows for key in row)
    assert [row["rollout/env_steps"] for row in rows] == [16.0, 16.0]
    info = evaluated(run, "eval.record_video=false")
    assert "success_once" not in info
    assert len(info["return_interval"]) == 2
    assert "solved" not in capsys.readouterr().out


def test_a_goal_of_success_is_refused_where_there_is_none(tmp_path) -> None:
    with pytest.raises(Exception, match=r"run\.until_success is 0\.9, but HalfCheetah-v5 does not tell"):
        trained(COMMANDS[0], tmp_path / "run", "env.horizon=6", "env.chunks_per_rollout=4", "run.until_success=0.9")
