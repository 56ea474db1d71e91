"""Held-out episodes: which ones, how many, how they act, what is written; and when a comparison is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from runs import clone, cluster, tiny, train
from training_faults import lost, once

from envs.episodes import EpisodeEnv
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationResult, held_out, max_failures
from rlinf_embodied.embodied.rollout_stage import episodes_of
from rlinf_embodied.errors import CheckpointError, ConfigError, RlinfError
from rlinf_embodied.randomness import TRAINING_SEED_BIT
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.telemetry.metrics import wilson
from rlinf_embodied.workflow.graph import StageSpec

ENV = ["env=point_reach", "env.obs_size=16", "env.chunk=4", "env.horizon=12", "env.block_size=4"]
SMALL = ["eval.num_envs=4", "eval.video_size=32", "eval.num_videos=2", "eval.record_video=false"]


def evaluate(folder: Path, *overrides: str) -> dict:
    """Runs what experiments/evaluate.py runs; returns eval_info.json."""
    given = {text.split("=", 1)[0] for text in overrides}
    defaults = [text for text in ("cluster=serial", *SMALL) if text.split("=", 1)[0] not in given]
    every = [*defaults, f"run.dir={folder}", *overrides]
    evaluate_command(compose_evaluate(every))
    return json.loads((folder / "eval_info.json").read_text())


def seeds(info: dict) -> list[int]:
    return [episode["seed"] for episode in info["episodes"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[int]]:
    """A run of two iterations with a checkpoint after each, and the seeds of all its episodes."""
    folder, seen, begin = tmp_path_factory.mktemp("trained"), [], EpisodeEnv.reset
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpisodeEnv, "reset", lambda self, new, rows=None: seen.extend(new) or begin(self, new, rows))
        train(tiny(f"run.dir={folder}", "run.num_iterations=2", "checkpoint.every=1", "eval.num_episodes=7"))
    return folder, seen


# ---------------------------------------------------------------------------------------------------------- episodes
@pytest.mark.parametrize(("episodes", "envs"), [(7, 4), (5, 8)])
def test_every_seed_is_evaluated_once_whatever_the_number_of_rows(tmp_path, episodes: int, envs: int) -> None:
    info = evaluate(tmp_path, "policy=random", *ENV, f"eval.num_episodes={episodes}", f"eval.num_envs={envs}")
    assert seeds(info) == list(range(9000, 9000 + episodes))
    assert info["num_episodes"] == episodes
    assert all(episode["episode_len"] == 12 for episode in info["episodes"])  # whole ones, also when solved


def test_an_evaluation_begins_again_after_a_lost_worker(tmp_path, monkeypatch) -> None:
    few = ["policy=random", *ENV, "eval.num_episodes=2", "eval.num_envs=2"]
    expected = evaluate(tmp_path / "undisturbed", *few)
    calls = once(monkeypatch, Evaluation, "run", 0, lost())
    assert evaluate(tmp_path / "disturbed", *few)["episodes"] == expected["episodes"]
    assert len(calls) == 2


def test_late_chunks_are_evaluated_alike_whatever_the_number_of_rows(tmp_path) -> None:
    start, each = f"checkpoint={clone(tiny('policy=flow_vla'))}", "eval.num_episodes=6"
    late = ["env.execute_steps=2", "env.perturb.inference_delay=1", "env.perturb.inference_jitter=1"]
    ways: dict[str, list[str]] = {"plain": [], "rtc": ["env.rtc=linear"], "mean": ["eval.temporal_ensemble=0.1"]}
    returns = {}
    for way, more in ways.items():
        for rows in (2, 6):
            info = evaluate(tmp_path / f"{way}{rows}", start, *late, *more, each, f"eval.num_envs={rows}")
            returns[way, rows] = [episode["return"] for episode in info["episodes"]]
        assert returns[way, 2] == pytest.approx(returns[way, 6], abs=1e-4)
    assert len({tuple(returns[way, 6]) for way in ways}) == 3
    with pytest.raises(ConfigError, match=r"eval.temporal_ensemble is 0.1, but all 4 actions of a chunk are executed"):
        evaluate(tmp_path / "refused", start, "eval.temporal_ensemble=0.1", each)


def test_an_episode_ends_at_its_first_success_where_the_benchmark_has_it_so(tmp_path) -> None:
    info = evaluate(tmp_path, "policy=expert", *ENV, "eval.num_episodes=8", "eval.end_at_success=true")
    lengths = [episode["episode_len"] for episode in info["episodes"]]
    assert [episode["success_at_end"] for episode in info["episodes"]] == [1.0 if n < 12 else 0.0 for n in lengths]
    assert min(lengths) < 12


def test_where_rows_have_several_tasks_each_is_counted_by_itself(tmp_path, capsys) -> None:
    small = ["env.obs_size=4", "env.horizon=20", "env.chunks_per_rollout=4", "env.chunk=5", "env.options.timeout_s=200"]
    few = ["eval.num_episodes=12", "eval.seed=0", "eval.num_envs=4"]
    env = ["env=libero", "env.options.suite=goal", "env.options.adapter=libero_stand_in.StandIn", *small]
    info = evaluate(tmp_path, "policy=random", *env, *few, "eval.end_at_success=true")
    printed = capsys.readouterr().out
    of = {name: [e["success_once"] for e in info["episodes"] if e["task"] == name] for name in info["tasks"]}
    assert list(of) == [f"libero_goal_{k}" for k in range(10)]  # in the order of the suite
    assert [len(solved) for solved in of.values()] == [2, 2, *[1] * 8]
    for name, solved in of.items():
        assert info["tasks"][name]["success_once"] == sum(solved) / len(solved)
        assert f"of {len(solved)}" in next(line for line in printed.splitlines() if line.startswith(name))


def test_the_first_episodes_of_a_round_are_dealt_to_all_blocks() -> None:
    env = EnvConfig(num_envs=12, block_size=4)
    numbers = episodes_of(env, 2, np.arange(12))
    assert sorted(numbers) == list(range(24, 36))
    assert [sum(numbers[block : block + 4] < 24 + 6) for block in (0, 4, 8)] == [2, 2, 2]


def test_evaluation_never_sees_a_training_seed(trained) -> None:
    assert {seed for seed in trained[1] if seed < TRAINING_SEED_BIT} == set(range(9000, 9007))
    assert any(seed >= TRAINING_SEED_BIT for seed in trained[1])


# ---------------------------------------------------------------------------------------------------- what is written
def test_eval_info_says_what_was_evaluated_and_its_summary_is_the_mean_of_the_episodes(tmp_path) -> None:
    folder = clone(tiny())
    info = evaluate(tmp_path, f"checkpoint={folder}", "eval.num_episodes=10")
    for key in ("success_once", "success_at_end", "return", "episode_len"):
        assert info[key] == pytest.approx(sum(e[key] for e in info["episodes"]) / 10)
    successes = sum(e["success_once"] for e in info["episodes"])
    assert 0 < successes < 10
    assert tuple(info["success_once_interval"]) == wilson(int(successes), 10)
    said = {"policy": "checkpoint", "checkpoint": str(folder), "greedy": True, "first_seed": 9000}
    assert said.items() <= info.items()
    assert info["env"]["task"] == "PointReach-v0"
    assert info["env"]["obs_size"] == 16  # of the checkpoint, not of the default config
    assert info["backend"] == "point_reach"
    assert "torch" in info["versions"]


def frames(path: Path) -> list:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_the_first_episodes_are_filmed_one_file_each(tmp_path) -> None:
    info = evaluate(tmp_path, "policy=expert", *ENV, "eval.num_episodes=6", "eval.record_video=true")
    videos = tmp_path / "videos/step_0"
    expected = {f"PointReach-v0--seed={e['seed']}--success={int(e['success_once'])}.mp4" for e in info["episodes"][:2]}
    assert {path.name for path in videos.iterdir()} == expected
    for name in expected:
        shown = frames(videos / name)
        assert len(shown) == 12
        assert shown[0].shape == (32, 32, 3)
        assert (shown[0] != shown[-1]).any()  # something moves


# -------------------------------------------------------------------------------------------------------- checkpoints
def test_training_checkpoints_and_the_link_to_the_latest_can_be_evaluated(trained, tmp_path, capsys) -> None:
    checkpoints = trained[0] / "checkpoints"
    by_name = evaluate(tmp_path / "a", f"checkpoint={checkpoints / 'step_000002'}", "eval.num_episodes=7")
    out = capsys.readouterr().out
    assert "episodes 4/7" in out
    assert "episodes 7/7" in out
    assert "at_end: solved when the episode's 12 steps are over" in out
    by_link = evaluate(tmp_path / "b", f"checkpoint={checkpoints / 'latest'}", "eval.num_episodes=7")
    summary = json.loads((trained[0] / "summary.json").read_text())
    assert by_name["episodes"] == by_link["episodes"]
    assert by_name["success_once"] == summary["after"]["success_once"]
    assert by_name["return"] == pytest.approx(summary["after"]["return"])


def test_an_evaluation_under_other_conditions_is_refused_unless_allowed(tmp_path) -> None:
    folder = clone(tiny())
    with pytest.raises(CheckpointError, match=r"horizon is 12 there and 8 here.* or allow_mismatch=true"):
        evaluate(tmp_path / "a", f"checkpoint={folder}", "env.horizon=8", "eval.num_episodes=2")
    assert not (tmp_path / "a").exists()
    changed = [
        "env.horizon=8",
        "allow_mismatch=true",
    ]  # no multiple of the default's chunk of 5, but of the checkpoint's
    info = evaluate(tmp_path / "b", f"checkpoint={folder}", "eval.num_episodes=2", *changed)
    assert info["episodes"][0]["episode_len"] == 8


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env.obs_size=32", r"made for .*'image 0': \[16, 16, 3\].* but this env shows .*'image 0': \[32, 32, 3\]"),
        ("env.cameras=[a,b]", r"made for .*'image 0': \[16, 16, 3\]\}, but this env shows .*'image 1'"),
        ("env.chunk=2", r"chunks of \[4, 2\], but PointReach-v0 takes \[2, 2\]: .* env.chunk"),
    ],
)
def test_other_shapes_are_refused_before_a_step_also_where_a_mismatch_is_allowed(tmp_path, override, says) -> None:
    allowed = [f"checkpoint={clone(tiny())}", override, "eval.num_episodes=2", "allow_mismatch=true"]
    with pytest.raises(RlinfError, match=says):
        evaluate(tmp_path / "a", *allowed)
    assert not (tmp_path / "a/eval_info.json").exists()


def test_a_folder_that_is_no_checkpoint_of_ours_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint is .*nowhere"):
        evaluate(tmp_path / "a", f"checkpoint={tmp_path / 'nowhere'}")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "openvla"}')
    with pytest.raises(CheckpointError, match=r"holds no evaluation.json: it was not written by this project"):
        evaluate(tmp_path / "a", f"checkpoint={foreign}")
    (foreign / "evaluation.json").write_text('{"env": 3}')
    with pytest.raises(CheckpointError, match=r"cannot be read .* it is damaged, or was written by another version"):
        evaluate(tmp_path / "a", f"checkpoint={foreign}")
    assert not (tmp_path / "a").exists()


# ------------------------------------------------------------------------------------------------------------- facts
def test_evaluation_runs_whole_episodes_whatever_training_does() -> None:
    config = tiny("eval.num_envs=6")
    env = replace(config.env, carry_over=True, chunks_per_rollout=1)
    changed = held_out(env, config.eval, config.run).env
    assert (changed.num_envs, changed.block_size, changed.chunks_per_rollout) == (6, 2, 3)
    assert (changed.auto_reset, changed.carry_over, changed.hold_steps) == (False, False, 0)


@pytest.mark.parametrize(("episodes", "target", "failures"), [(200, 0.97, 6), (200, 1.0, 0), (30, 0.9, 3), (7, 0.5, 3)])
def test_as_many_episodes_may_fail_as_the_target_leaves(episodes: int, target: float, failures: int) -> None:
    assert max_failures(episodes, target) == failures


def test_a_check_ends_as_soon_as_it_can_only_fail() -> None:
    config = tiny("eval.num_episodes=24", "env.horizon=4")  # too short for long ways
    stage = StageSpec("check_policy", "rlinf_embodied.embodied.evaluation.NoPolicyStage", None)
    asked = held_out(config.env, config.eval, config.run, acting="expert")

    def check(target: float | None) -> EvaluationResult:
        return Evaluation(asked, stage, SerialSession(), cluster(2), target).run(0, target)

    whole = check(None)
    first = Evaluation(asked, stage, SerialSession(), cluster(2), 1.0).run(0)  # to its end, for its score
    assert (first.episodes, first.score) == (whole.episodes, whole.score)
    unsolved = sum(e.metrics["success_at_end"] == 0 for e in whole.episodes)
    assert len(whole.episodes) == 24
    assert 2 < unsolved < 24
    strict = check(1.0)
    assert len(strict.episodes) < 24
    assert strict.episodes == whole.episodes[: len(strict.episodes)]
    just = check(1 - unsolved / 24)
    assert (just.episodes, just.score) == (whole.episodes, whole.score)
    assert strict.score is None
    assert strict.metrics() == {"eval/success_at_end_at_most": pytest.approx(23 / 24)}
    assert whole.score == pytest.approx(1 - unsolved / 24)


def test_the_score_of_a_task_without_success_is_its_return() -> None:
    config = tiny("env=gymnasium", "env.id=Pendulum-v1", "env.horizon=12", "policy=actor_critic")
    asked = held_out(config.env, config.eval, config.run, acting="random")
    stage = StageSpec("check_policy", "rlinf_embodied.embodied.evaluation.NoPolicyStage", None)
    found = Evaluation(asked, stage, SerialSession(), cluster(2)).run(0)
    assert found.score == found.mean_return < 0


# -------------------------------------------------------------------------------------------------------- comparisons
def compare(folder: Path, *overrides: str) -> dict:
    small = [*SMALL, "cluster=serial", f"run.dir={folder}", "eval.num_episodes=12"]
    evaluate_command(compose_evaluate([*small, *overrides]))
    return json.loads((folder / "comparison.json").read_text())


def test_two_policies_act_in_the_same_episodes_and_one_does_not_differ_from_itself(tmp_path, capsys) -> None:
    folder = clone(tiny())
    same = compare(tmp_path / "same", f"compare={folder},{folder}")
    assert (same["a"], same["success_once"]["only_a"], same["success_once"]["only_b"]) == (str(folder), 0, 0)
    assert (same["success_once"]["p_value"], same["return"]["difference"]) == (1.0, 0.0)
    assert "no difference is shown; eval.num_episodes=" in capsys.readouterr().out
    late = shutil.copytree(folder, tmp_path / "late")
    conditions = json.loads((late / "evaluation.json").read_text())
    conditions["env"]["perturb"]["delay"] = 2
    conditions["env"]["num_envs"] *= 2
    (late / "evaluation.json").write_text(json.dumps(conditions))
    differ = compare(tmp_path / "differ", f"compare={folder},{late}")["training_differs"]
    assert differ == ["env.perturb.delay is 0 for a and 2 for b"]
    assert f"trained in other envs: {differ[0]}" in capsys.readouterr().out
    other = compare(tmp_path / "other", "compare=random,expert", *ENV)
    arms = [json.loads((tmp_path / "other" / arm / "eval_info.json").read_text()) for arm in "ab"]
    assert seeds(arms[0]) == seeds(arms[1])
    assert other["success_once"]["difference"] == arms[1]["success_once"] - arms[0]["success_once"] > 0.5
    assert other["success_once"]["p_value"] < 0.05
    with pytest.raises(RlinfError, match=r"compare is 'expert', but it names two policies"):
        compose_evaluate(["compare=expert"])


def test_a_perturbed_world_is_compared_with_the_same_episodes_of_the_unperturbed_one(tmp_path) -> None:
    found = compare(tmp_path, "policy=expert", *ENV, "perturb.delay=6")
    assert (found["a"], found["b"]) == ("env.perturb={}", "env.perturb={'delay': 6}")
    assert found["success_once"]["only_a"] > 6 > found["success_once"]["only_b"]
    assert json.loads((tmp_path / "b/eval_info.json").read_text())["env"]["perturb"]["delay"] == 6
