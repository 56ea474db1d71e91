"""Scripts answer on the right stream and leave with true exit codes."""

import errno
import sys

import pytest
import yaml

from rlinf_embodied.command_line import evaluate_main, help_text, math_main, train_main
from rlinf_embodied.compose import EVALUATE_GROUPS, MATH_GROUPS, TRAIN_GROUPS, choices
from rlinf_embodied.config import EvaluateConfig, MathConfig, TrainConfig
from rlinf_embodied.errors import CheckpointError, PlanError, RunFileError, WorkerError


def exit_code(monkeypatch, script_main, entry, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with pytest.raises(SystemExit) as left:
        script_main(entry)
    return left.value.code


def never(config):
    raise AssertionError("the work must not start")


def test_the_work_gets_the_config_and_gives_the_exit_code(monkeypatch):
    seen = []
    assert exit_code(monkeypatch, train_main, lambda config: seen.append(config.run.seed), "run.seed=7") == 0
    assert seen == [7]
    assert exit_code(monkeypatch, train_main, lambda config: 3) == 3


def test_a_dry_run_prints_the_resolved_config_only(monkeypatch, capsys):
    assert exit_code(monkeypatch, train_main, never, "run.dry=true", "algorithm=grpo") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["algorithm"]["name"] == "grpo"
    assert printed["env"]["chunks_per_rollout"] == 10  # resolved, not an interpolation
    assert exit_code(monkeypatch, evaluate_main, never, "run.dry=true", "policy=random") == 0
    assert yaml.safe_load(capsys.readouterr().out)["policy"] == "random"


def test_bad_input_is_one_line_on_the_error_stream(monkeypatch, capsys):
    assert exit_code(monkeypatch, train_main, never, "env=manskill_pick") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: env is 'manskill_pick'")
    assert err.count("\n") == 1


def test_the_reasoning_workflow_has_choices_of_its_own(monkeypatch, capsys):
    assert exit_code(monkeypatch, math_main, never, "algorithm=ppp") == 2
    known = "dapo, dr_grpo, grpo, grpo_annealed, grpo_token, ppo, rloo"
    assert f"did you mean algorithm=ppo? choose from {known}" in capsys.readouterr().err
    assert exit_code(monkeypatch, math_main, never, "run.dry=true", "algorithm=rloo") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["algorithm"]["name"], printed["data"]["level"]) == ("rloo", "sum4-6-9")


@pytest.mark.parametrize("error", [PlanError("too few devices"), CheckpointError("foreign")])
def test_input_that_proves_wrong_later_exits_with_2_as_well(monkeypatch, capsys, error):
    def work(config):
        raise error

    assert exit_code(monkeypatch, train_main, work) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_failure_of_the_work_keeps_its_traceback(monkeypatch):
    def work(config):
        raise WorkerError("worker 1 died")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(WorkerError):
        train_main(work)


def test_an_interrupt_exits_with_130(monkeypatch):
    def work(config):
        raise KeyboardInterrupt

    assert exit_code(monkeypatch, train_main, work) == 130


@pytest.mark.parametrize(
    ("schema", "groups"),
    [(TrainConfig, TRAIN_GROUPS), (EvaluateConfig, EVALUATE_GROUPS), (MathConfig, MATH_GROUPS)],
)
def test_help_lists_every_choice_of_every_group(schema, groups):
    text = help_text("script.py", schema, groups)
    for group in groups:
        line = next(line for line in text.splitlines() if line.startswith(f"  {group} "))
        assert [name for name in choices(group, schema) if name not in line] == []
    assert "run.dry=true" in text or schema is EvaluateConfig


def test_help_exits_with_0_before_anything_is_checked(monkeypatch, capsys):
    assert exit_code(monkeypatch, train_main, never, "env=nonsense", "--help") == 0
    assert capsys.readouterr().out.startswith("usage: python script.py")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x/config.yaml"),
            "runs/x/config.yaml cannot be written",
        ),
        (OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "(No usable temporary directory"),
    ],
)
def test_a_full_disk_is_one_line_with_what_to_do(monkeypatch, capsys, error, says):
    def work(config):
        raise error

    assert exit_code(monkeypatch, train_main, work) == 1
    printed = capsys.readouterr().err
    assert says in printed
    assert "free space" in printed
    assert printed.count("\n") == 1
    error.errno, error.strerror = errno.EACCES, "Permission denied"
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(OSError, match="Permission denied"):
        train_main(work)


def test_a_file_of_the_run_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    def work(config):
        raise RunFileError("runs/x/metrics.jsonl cannot be written (No space left on device): free space")

    assert exit_code(monkeypatch, train_main, work) == 1
    assert capsys.readouterr().err == (
        "error: runs/x/metrics.jsonl cannot be written (No space left on device): free space\n"
    )
