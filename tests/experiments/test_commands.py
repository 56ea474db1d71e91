"""The commands as people type them: true exit codes, one clear line for wrong input, and nothing written is harmed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import clone, metric_rows, tiny, tiny_overrides, train
from scripts import call

from rlinf_embodied.learning import checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS_TOO = os.pathsep.join([str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
PATIENCE_S = 280  # for a process that hangs; what is tested does not depend on it


def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a script in a separate process, its two streams as one."""
    command = [sys.executable, "-u", str(REPOSITORY / "experiments" / f"{script}.py"), *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        process_group=0,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Returns what a process printed up to the line that holds `text`."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"{text!r} was never printed:\n{printed}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of three iterations."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny(f"run.dir={folder}", "checkpoint.every=1"))
    return folder


# ---------------------------------------------------------------------------------------------------------- good input
def test_train_then_evaluate(monkeypatch, capsys, tmp_path) -> None:
    code, out, _ = call(monkeypatch, capsys, "train_vla", *tiny_overrides(f"run.dir={tmp_path / 'run'}"))
    assert code == 0
    last = out.strip().splitlines()[-1]
    assert last.startswith("before RL success_once ")
    assert last.count("at_end ") == 2
    latest = tmp_path / "run/checkpoints/latest"
    chosen = [f"checkpoint={latest}", "cluster=serial", "eval.num_episodes=6", "eval.num_envs=4"]
    code, out, _ = call(monkeypatch, capsys, "evaluate", *chosen, "eval.video_size=32", f"run.dir={tmp_path / 'eval'}")
    assert code == 0
    assert "PointReach-v0: success_once" in out
    assert "seeds 9000..9005" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    info = json.loads((tmp_path / "eval/eval_info.json").read_text())
    assert info["success_once"] == summary["after"]["success_once"]


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.slow
def test_a_machine_that_cannot_render_learns_how_to_get_there(tmp_path) -> None:
    nothing = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}
    chosen = ["cluster=serial", f"run.dir={tmp_path}", "eval.num_episodes=1", "env=maniskill_pick"]
    process = start("train_vla", *chosen, **nothing)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "error: no Vulkan device can render" in printed
    assert "run `make setup`" in printed
    assert "Traceback" not in printed


def test_an_unknown_maniskill_task_is_named_with_its_neighbours(monkeypatch, capsys, tmp_path) -> None:
    chosen = ["policy=expert", "env=maniskill", "env.task=PickCubee-v1", "cluster=serial"]
    code, _, err = call(monkeypatch, capsys, "evaluate", *chosen, f"run.dir={tmp_path}")
    assert code == 2
    assert "error: env.task is 'PickCubee-v1', but ManiSkill knows no such name: did you mean PickCube-v1" in err


# -------------------------------------------------------------------------------------------------------------- signals
SIGNALS = [pytest.param(signal.SIGINT, "interrupt", 130, marks=pytest.mark.slow), (signal.SIGTERM, "SIGTERM", 143)]


@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_a_signal_during_training_leaves_a_checkpoint_from_which_the_same_run_continues(
    tmp_path, finished, number: int, name: str, code: int
) -> None:
    gated = ["env._target_=gated_reach.make_env", f"warm_start.checkpoint={clone(tiny())}", "checkpoint.every=0"]
    overrides = tiny_overrides(f"run.dir={tmp_path / 'run'}", *gated, "eval.num_episodes=4")
    gate, latest = tmp_path / "gate", tmp_path / "run/checkpoints/latest"
    process = start("train_vla", *overrides, RLINF_TEST_GATE=str(gate), PYTHONPATH=TESTS_TOO)
    read_until(process, "waiting at the gate")  # in the second iteration
    process.send_signal(number)
    read_until(process, f"{name}: finishing this iteration")
    gate.touch()
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, printed
    assert checkpoint.verify(latest).step == 2
    assert "stopped after iteration 2; resume with the same command" in printed
    assert not (tmp_path / "run/summary.json").exists()
    summary = train(tiny(f"run.dir={tmp_path / 'run'}", *gated))
    assert summary["weights_sha256"] == json.loads((finished / "summary.json").read_text())["weights_sha256"]
    assert metric_rows(tmp_path / "run") == metric_rows(finished)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_a_signal_during_the_warm_start_leaves_nothing_half_written(
    tmp_path, number: int, name: str, code: int
) -> None:
    long = ["warm_start.head_epochs=100000", f"run.dir={tmp_path / 'run'}"]
    process = start("train_vla", *tiny_overrides(*long), RLINF_EMBODIED_CACHE=str(tmp_path / "cache"))
    read_until(process, "fine-tuning ")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert ("interrupted" if code == 130 else f"stopped by {name}") in printed
    assert "Traceback" not in printed
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.ray
@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_with_ray_workers_a_signal_stops_as_cleanly(tmp_path, number: int, name: str, code: int) -> None:
    chosen = ["cluster=local", "cluster.num_devices=2", "plan=collocated", "run.num_iterations=2000"]
    chosen += [f"run.dir={tmp_path}", f"warm_start.checkpoint={clone(tiny())}", "eval.num_episodes=4"]
    process = start("train_vla", *tiny_overrides(*chosen))
    read_until(process, "iteration 1/2000")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, printed
    assert f"{name}: finishing this iteration" in printed
    assert "Traceback" not in printed
    assert "***" not in printed  # of a library's own handler
    assert checkpoint.verify(tmp_path / "checkpoints/latest").step >= 1


@pytest.mark.parametrize(
    "cluster",
    [pytest.param("serial", marks=pytest.mark.slow), pytest.param("local", marks=[pytest.mark.ray, pytest.mark.slow])],
)
def test_two_runs_at_once_on_one_machine_do_not_disturb_each_other(tmp_path, finished, cluster: str) -> None:
    """They even make the same clone at the same time."""
    environment = {"RLINF_EMBODIED_CACHE": str(tmp_path / "cache")}
    names = ("a", "b")
    chosen = [f"cluster={cluster}", "cluster.num_devices=2", "plan=collocated", "eval.num_episodes=4"]
    runs = [start("train_vla", *tiny_overrides(f"run.dir={tmp_path / n}", *chosen), **environment) for n in names]
    printed = [process.communicate(timeout=PATIENCE_S)[0] for process in runs]
    assert [process.returncode for process in runs] == [0, 0], "".join(printed)
    digests = {json.loads((tmp_path / n / "summary.json").read_text())["weights_sha256"] for n in names}
    assert digests == {json.loads((finished / "summary.json").read_text())["weights_sha256"]}
    assert len(list((tmp_path / "cache/warm_start").iterdir())) == 1


def test_a_simulator_that_fails_ends_the_run_with_its_reason(monkeypatch, capsys, tmp_path) -> None:
    faulty = ["env._target_=faulty_reach.make_env", "env.options.crash_at_step=20"]
    crash = [*faulty, f"warm_start.checkpoint={clone(tiny())}", f"run.dir={tmp_path}"]
    code, _, err = call(monkeypatch, capsys, "train_vla", *tiny_overrides(*crash))
    assert code == 1
    assert err.startswith("error: worker 0 ")
    assert "env.options.crash_at_step is 20: point_reach fails as configured" in err
