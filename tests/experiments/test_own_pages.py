"""docs/own_env.md, own_policy.md and gymnasium.md do what they say: their examples train and are evaluated."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from runs import tiny, train

from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.job import EmbodiedJob

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments/examples"
ENV, POLICY, GYM = ((ROOT / f"docs/{name}.md").read_text() for name in ("own_env", "own_policy", "gymnasium"))
SMALL = ["env.num_envs=4", "env.block_size=2", "algorithm.num_minibatches=2", "eval.num_episodes=2", "eval.num_envs=2"]
EPISODES = ["env.horizon=10", "env.chunks_per_rollout=10"]
SHORT = ["algorithm.epochs=1", "algorithm.value_epochs=1", "policy.options.hidden_size=16", "run.num_iterations=2"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch) -> Path:
    """What PYTHONPATH does for a command."""
    (tmp_path / "my_policy.py").write_text(blocks(POLICY, "python")[1].removeprefix("# my_policy.py\n"))
    for folder in (EXAMPLE, tmp_path):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    monkeypatch.chdir(ROOT)
    return tmp_path


def words_of(page: str, part: str, run: Path, *more: str) -> list[str]:
    """Returns the page's command that contains `part`, with few rows and `more`."""
    (printed,) = [
        text for text in re.findall(r"^python experiments/train_vla\.py (.*)$", page, re.MULTILINE) if part in text
    ]
    given = dict(text.split("=", 1) for text in [*printed.split(), *SMALL, *more, f"run.dir={run}"])
    return [f"{key}={value}" for key, value in given.items()]


def evaluated(run: Path, *more: str) -> dict:
    chosen = [f"checkpoint={run}/checkpoints/latest", "eval.num_episodes=2", "eval.num_envs=2", "cluster=serial"]
    evaluate_command(compose_evaluate([*chosen, f"run.dir={run}/eval", *more]))
    return json.loads((run / "eval/eval_info.json").read_text())


@pytest.mark.parametrize(
    ("page", "name", "length"), [(ENV, "own_env", 65), (POLICY, "own_policy", 130), (GYM, "own_gymnasium", 65)]
)
def test_the_pages_show_the_files(page: str, name: str, length: int) -> None:
    for language, suffix in (("python", "py"), ("yaml", "yaml")):
        assert blocks(page, language)[0] == (EXAMPLE / f"{name}.{suffix}").read_text()
    assert len(blocks(page, "python")[0].splitlines()) <= length


# ------------------------------------------------------------------------------------------------------------------ env
def test_the_env_trains_from_scratch_and_is_evaluated(importable, capsys) -> None:
    run = importable / "run"
    more = [*EPISODES, "policy.options.hidden_size=16", "run.num_iterations=1", "cluster=serial"]
    config = compose_train(words_of(ENV, "own_env", run, *more))
    EmbodiedJob(config).require_checkpoint(None)
    assert train(config)["iterations"] == 1
    out = capsys.readouterr().out
    assert "videos   none, the env cannot be filmed" in out
    info = evaluated(run)
    assert (info["env"]["task"], info["episode_len"]) == ("Pusher-v5", 10)
    assert "videos in" not in capsys.readouterr().out


@pytest.mark.ray
def test_workers_find_the_env(importable, ray_cluster) -> None:
    more = [*EPISODES, "policy.options.hidden_size=16", "run.num_iterations=1"]
    words = words_of(ENV, "own_env", importable / "run", *more, "cluster.num_devices=2", "plan=collocated")
    assert train(compose_train(words))["iterations"] == 1


# --------------------------------------------------------------------------------------------------------------- policy
def test_the_policy_trains_on_the_env_of_the_docs_and_is_evaluated(importable) -> None:
    run = importable / "run"
    more = [*EPISODES, "policy.options.width=8", "run.num_iterations=2", "cluster=serial"]
    assert train(compose_train(words_of(POLICY, "own_env", run, *more)))["iterations"] == 2
    saved = json.loads((run / "checkpoints/latest/config.json").read_text())
    assert (saved["architectures"], saved["policy"]["options"]) == (["OwnPolicy"], {"width": 8, "std": 0.2})
    assert evaluated(run)["env"]["task"] == "Pusher-v5"


def test_the_policy_is_cloned_from_images_and_then_trained_by_ppo(importable) -> None:
    run, few = importable / "run", ["eval.num_episodes=20", "eval.num_envs=4", "eval.record_video=false"]
    more = ["warm_start.num_demos=100", "warm_start.epochs=80", "warm_start.lr=3e-3", "warm_start.head_epochs=0"]
    more += ["cluster=serial", f"warm_start.cache_dir={importable}", "policy.options.width=32", "env.obs_size=32"]
    summary = train(compose_train(words_of(POLICY, "point_reach", run, *more, *few, "run.num_iterations=2")))
    before, after = (summary[key]["success_once"] for key in ("before", "after"))
    assert min(before, after) >= 0.6
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["losses/initial_log_ratio"] < 1e-5


@pytest.mark.slow
@pytest.mark.sim
def test_the_policy_trains_on_maniskill_and_is_filmed(importable) -> None:
    run = importable / "pick"
    more = [*EPISODES, "policy.options.width=8", "run.num_iterations=1", "cluster=serial", "eval.record_video=false"]
    more += ["warm_start.num_demos=4", "warm_start.epochs=1", "env.horizon=50"]
    assert train(compose_train(words_of(POLICY, "maniskill_pick", run, *more)))["iterations"] == 1
    evaluated(run, "eval.num_episodes=1", "eval.num_envs=1", "eval.video_size=32")
    assert list((run / "eval/videos").rglob("*.mp4"))


def test_the_pages_other_network_trains(importable) -> None:
    words = ["policy=state", "policy._target_=my_policy.ReluPolicy", "algorithm=ppo_dense"]
    small = ["env.chunk=4", "env.block_size=4", "run.num_iterations=1", "eval.num_episodes=2"]
    assert train(tiny(*words, *small, f"run.dir={importable / 'run'}"))["iterations"] == 1
    saved = json.loads((importable / "run/checkpoints/latest/config.json").read_text())
    assert saved["architectures"] == ["ReluPolicy"]


# ------------------------------------------------------------------------------------------------------------ gymnasium
def test_the_image_env_trains_a_convolutional_policy_and_tells_success(importable, capsys) -> None:
    run = importable / "run"
    train(compose_train(words_of(GYM, "own_gymnasium", run, *SHORT, "cluster=serial")))
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["after"]["success_once"] <= 1
    assert summary["after"]["return"] in (-1.0, 0.0, 1.0)
    info = evaluated(run)
    assert info["episode_len"] == 9  # the env's own end, which is no time limit
    assert "success_once" in info
    assert "videos in" in capsys.readouterr().out  # the env draws itself


def test_a_task_without_success_shows_its_return_everywhere(importable, capsys) -> None:
    run, more = importable / "run", [*SHORT, "env.horizon=6", "env.chunks_per_rollout=4", "cluster=serial"]
    words = words_of(GYM, "HalfCheetah", run, *more, "eval.num_episodes=3", "eval.record_video=false")
    with pytest.raises(Exception, match=r"run\.until_success is 0\.9, but HalfCheetah-v5 does not tell"):
        train(compose_train([*words, "run.until_success=0.9"]))
    train(compose_train(words))
    summary, out = json.loads((run / "summary.json").read_text()), capsys.readouterr().out
    low, high = summary["after"]["return_interval"]
    assert low <= summary["after"]["return"] <= high
    assert not any("success" in key for key in summary["after"])
    assert re.search(r"before RL return -?[\d.]+ \[.*\]; after return -?[\d.]+ \[", out)
    assert "success_once" not in out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("success" in key for row in rows for key in row)
    assert [row["rollout/env_steps"] for row in rows] == [16.0, 16.0]
    info = evaluated(run, "eval.record_video=false")
    assert "success_once" not in info
    assert len(info["return_interval"]) == 2
    assert "solved" not in capsys.readouterr().out
