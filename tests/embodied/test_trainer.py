"""A run may be stopped, killed or resumed anywhere: it ends where an uninterrupted one does; what a job refuses."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest
from runs import clone, four, metric_rows, tiny, tiny_overrides, train, trainer_of
from scripts import call
from stopped_runs import interrupt_in, same_end, straight_runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import load
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied import job
from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationResult
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import CheckpointError, ConfigError, SimulatorError
from rlinf_embodied.learning import checkpoint


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder of an uninterrupted run."""
    return straight_runs(tmp_path_factory, lambda folder, _: train(four(folder)), "ppo")


# ------------------------------------------------------------------------------------------------------ stop and go on
def test_ctrl_c_between_two_checkpoints_writes_one_of_its_own(straight, monkeypatch, tmp_path, capsys) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, 2)
        train(four(tmp_path, "plan=disaggregated", "cluster.num_devices=3"), code=130)
    assert "stopped after iteration 3" in capsys.readouterr().out
    assert checkpoint.verify(tmp_path / "checkpoints/latest").step == 3
    train(four(tmp_path))
    same_end(tmp_path, straight())


def test_a_second_ctrl_c_ends_the_run_at_once(monkeypatch, tmp_path) -> None:
    def run(executor, number, *end):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(job_module, "run_iteration", run)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(four(tmp_path)).run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_that_died_continues_from_its_last_checkpoint(straight, monkeypatch, tmp_path) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, 3, error=SimulatorError("the simulator is gone"))
        with pytest.raises(SimulatorError):
            trainer_of(four(tmp_path)).run()
    assert len(metric_rows(tmp_path)) == 3  # the third iteration was written after the checkpoint
    train(four(tmp_path))
    same_end(tmp_path, straight())


def score_evaluations(monkeypatch, scores: dict[int, float]) -> None:
    """Gives the evaluations after these iterations these scores."""
    run = Evaluation.run
    monkeypatch.setattr(Evaluation, "run", lambda self, step, **_: replace(run(self, step), score=scores.get(step)))


def test_the_reference_of_a_kl_is_the_start_also_for_a_run_that_resumes(tmp_path) -> None:
    coef = "algorithm.kl_coef=0.3"
    whole = train(four(tmp_path / "whole", coef))
    shutil.copytree(tmp_path / "whole/checkpoints/step_000002", tmp_path / "other/checkpoints/step_000002")
    assert train(four(tmp_path / "other", coef))["weights_sha256"] == whole["weights_sha256"]
    rows = metric_rows(tmp_path / "whole")
    assert metric_rows(tmp_path / "other") == rows[2:]
    assert rows[-1]["losses/reference_kl"] > rows[1]["losses/reference_kl"] >= 0


def test_the_best_evaluation_is_kept_beside_the_last_checkpoints(straight, monkeypatch, tmp_path) -> None:
    scores, kept = {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.1}, 2
    score_evaluations(monkeypatch, scores)
    with monkeypatch.context() as patch:
        interrupt_in(patch, 2)
        train(four(tmp_path, "eval.every=1", "checkpoint.keep=1"), code=130)
    summary = train(four(tmp_path, "eval.every=1", "checkpoint.keep=1"))
    assert summary["best"] == {"score": scores[kept], "iteration": kept}
    assert [path.name for path in (tmp_path / "best").glob("step_*")] == [f"step_{kept:06d}"]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000004"]
    assert checkpoint.verify(tmp_path / "best/latest").step == kept
    assert checkpoint.verify(tmp_path / "checkpoints/latest").step == 4
    assert summary["weights_sha256"] == json.loads((straight() / "summary.json").read_text())["weights_sha256"]


def test_a_run_ends_when_its_goal_is_reached_and_stays_ended(tmp_path, monkeypatch, capsys) -> None:
    goal = ["run.until_success=0.01", "eval.check_every=2", "eval.check_episodes=64", "run.num_iterations=9"]
    summary = train(four(tmp_path, *goal))
    assert summary["iterations"] == 2
    assert summary["checks_s"] > 0
    assert "check at 2: success_once" in (out := capsys.readouterr().out)
    assert "the goal is reached" in out
    assert [("check/success_at_end" in row) for row in metric_rows(tmp_path)] == [True, False, True]
    assert "weights: of iteration 2 (the last)" in out
    assert checkpoint.verify(tmp_path / "checkpoints/latest").step == 2
    interrupt_in(monkeypatch, 0, AssertionError("trained on"))
    again = train(four(tmp_path, *goal))
    assert (again["iterations"], again["weights_sha256"]) == (2, summary["weights_sha256"])


def score_checks(monkeypatch, scores: Sequence[float | None]) -> list[float | None]:
    """Gives the checks these scores, none of which reaches the goal; returns the best scores that they were told."""
    run, given = Evaluation.run, iter(scores)
    told: list[float | None] = []

    def scored(self: Evaluation, step: int, best: float | None = None, last: bool = False) -> EvaluationResult:
        result = run(self, step, best, last)
        if self.stage != "check_policy":
            return result
        told.append(best)
        return replace(result, score=next(given))

    monkeypatch.setattr(Evaluation, "run", scored)
    return told


GOAL = ["run.until_success=1.0", "eval.check_every=1", "eval.check_episodes=4"]


def test_a_run_that_misses_its_goal_ends_with_the_weights_of_its_best_check(straight, monkeypatch, tmp_path) -> None:
    scores, kept = [0.5, 0.7, 0.6, None, 0.4], 1
    told = score_checks(monkeypatch, scores)
    summary = train(four(tmp_path, *GOAL))
    assert (summary["iterations"], summary["best"]["iteration"]) == (4, kept)
    assert told[0] is None
    assert told[-1] == max(score for score in scores[:-1] if score is not None)
    ended = ["check/success_at_end_at_most" in row for row in metric_rows(tmp_path)]
    assert ended == [score is None for score in scores]
    model = (tmp_path / "checkpoints/latest/model.safetensors").read_bytes()
    assert model == (tmp_path / f"best/step_{kept:06d}/model.safetensors").read_bytes()
    whole = json.loads((straight() / "summary.json").read_text())["weights_sha256"]
    assert summary["weights_sha256"] != whole
    again = train(four(tmp_path, *GOAL))  # finished: nothing is trained, checked or brought back again
    assert (again["iterations"], again["weights_sha256"]) == (4, summary["weights_sha256"])


def test_a_run_ends_when_its_checks_have_not_improved_for_long(monkeypatch, tmp_path, capsys) -> None:
    score_checks(monkeypatch, [0.5, 0.7, 0.6, None, 0.9])
    summary = train(four(tmp_path, *GOAL, "run.patience=2"))
    assert (summary["iterations"], summary["best"]["iteration"]) == (3, 1)
    assert "2 checks in a row were no better than that of iteration 1" in capsys.readouterr().out
    again = train(four(tmp_path, *GOAL, "run.patience=2"))
    assert (again["iterations"], again["weights_sha256"]) == (3, summary["weights_sha256"])


def test_the_best_check_of_another_folder_is_not_returned_to(monkeypatch, tmp_path) -> None:
    told = score_checks(monkeypatch, [0.9, 0.1, 0.1, 0.2, 0.1, 0.3])
    train(four(tmp_path / "a", *GOAL, "run.num_iterations=2"))
    train(four(tmp_path / "b", *GOAL, f"resume={tmp_path / 'a/best/step_000000'}", "run.num_iterations=2"))
    assert told == [None, 0.9, 0.9, None, 0.2, 0.2]
    summary = json.loads((tmp_path / "b/summary.json").read_text())
    assert summary["best"] == {"score": 0.3, "iteration": 2}


# --------------------------------------------------------------------------------------------------------- refusals
def test_resume_from_what_is_no_checkpoint_is_refused(straight, tmp_path, nothing_starts) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "nowhere/latest": "does not exist",
        tmp_path / "empty": "is not a training checkpoint of this project",
        clone(tiny()): "is not a training checkpoint of this project",  # a policy without training state
        straight(): r"is needed .*give a folder such as <run.dir>/checkpoints/latest",
    }
    for path, reason in cases.items():
        with pytest.raises(CheckpointError, match=reason):
            trainer_of(four(tmp_path / "run", f"resume={path}"))
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------------------- run folder
def test_the_run_folder_holds_what_the_design_promises(tmp_path) -> None:
    chosen = ["eval.record_video=true", "eval.every=2", "cluster.num_devices=2"]
    summary = train(four(tmp_path, *chosen), draws=True)
    assert load(tmp_path / "config.yaml", TrainConfig).run.seed == 3
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["seed"] == 3
    assert {"versions", "git_revision", "hardware", "command"} <= set(manifest)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["name"], plan["num_devices"]) == ("collocated", 2)
    rows = metric_rows(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert [row["global_step"] for row in rows][-1] == summary["env_steps"]
    assert [i for i, row in enumerate(rows, 1) if "eval/success_once" in row] == [2]  # the last one comes after
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event.get("ph") == "X"}
    assert (tmp_path / "curve.png").exists()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"rollout/action_0", "losses/log_ratio"} <= set(board.Tags()["histograms"])
    assert len(board.Tags()["images"]) == 3  # a video of each episode
    promised = {
        *("iterations", "before", "after", "env_steps_per_s", "plan"),
        *("predicted_s_per_iteration", "measured_s_per_iteration", "weights_sha256"),
    }
    assert promised <= set(summary)
    assert (summary["iterations"], summary["plan"], summary["num_eval_episodes"]) == (4, "collocated", 3)
    low, high = summary["after"]["success_once_interval"]
    assert low <= summary["after"]["success_once"] <= high


@pytest.mark.parametrize(("coef", "refused"), [(0.01, True), (0.0, False)])
def test_an_entropy_bonus_is_refused_where_a_policy_has_none(coef: float, refused: bool) -> None:
    run = EmbodiedJob(tiny("policy=flow_vla", f"algorithm.entropy_coef={coef}", "warm_start.from_scratch=true"))
    if not refused:
        run.require_checkpoint(None)
        return
    with pytest.raises(ConfigError, match=r"algorithm.entropy_coef is 0.01, but policies.flow_vla.FlowVLA has none"):
        run.require_checkpoint(None)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (["env.carry_over=true"], True),
        (["env.carry_over=true", "env.options.backend=batched"], False),
        (["env.carry_over=false"], False),
    ],
)
def test_what_a_gpu_could_not_restore_is_not_carried_over(monkeypatch, given: list[str], refused: bool) -> None:
    gpus = Cluster("local", "cuda", num_devices=1, num_cores=2, memory_bytes=1 << 30)
    monkeypatch.setattr(job, "find_cluster", lambda config: gpus)
    start = ["env=maniskill_pick", "warm_start.from_scratch=true"]
    run = EmbodiedJob(tiny(*start, *given))
    if not refused:
        run.require_checkpoint(None)
        return
    with pytest.raises(ConfigError, match=r"env.carry_over is True.*carry_over=false, or env.options.backend=batched"):
        run.require_checkpoint(None)


BROKEN = """
import json

class Arm:
    def __init__(self, port):
        self.calibration = open(port + 1)

def make_env(config, num_envs, device="cpu", render_final=False):
    return Arm("/dev/arm0")
"""


def test_a_training_says_in_one_error_what_the_env_raised_and_where(monkeypatch, capsys, tmp_path) -> None:
    (module := tmp_path / "arm_without_port.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ["env._target_=arm_without_port.make_env", f"run.dir={tmp_path / 'run'}"]
    code, _, err = call(monkeypatch, capsys, "train_vla", *tiny_overrides(*chosen))
    assert code == 2
    first, *frames, action = err.splitlines()
    assert first.startswith("error: env._target_ is 'arm_without_port.make_env', but building its")
    assert 'raised TypeError: can only concatenate str (not "int") to str' in first
    assert "(env.task=PointReach-v0)" in first
    assert frames == [
        f'  {module}, line 9, in make_env: return Arm("/dev/arm0")',
        f"  {module}, line 6, in __init__: self.calibration = open(port + 1)",
    ]
    assert action.startswith("Fix it there, or the keys of env.* that it reads")
