"""Scripts answer on the right stream and leave with true exit codes."""

import errno
import json
from dataclasses import is_dataclass

import pytest
import yaml
from runs import tiny

from rlinf_embodied import train
from rlinf_embodied.command_line import help_text, main
from rlinf_embodied.compose import choices, compose_evaluation, groups, keys
from rlinf_embodied.config import EvaluateConfig, MathConfig, TrainConfig
from rlinf_embodied.errors import CheckpointError, CheckpointWriteError, PlanError, SimulatorCallError, WorkerError


def exit_code(schema, work, *arguments: str) -> int:
    composer = compose_evaluation if schema is EvaluateConfig else None
    with pytest.raises(SystemExit) as left:
        main(work, schema, composer, arguments)
    return left.value.code


def never(config):
    raise AssertionError("the work must not start")


def test_the_work_gets_the_config_and_gives_the_exit_code():
    seen = []
    assert exit_code(TrainConfig, lambda config: seen.append(config.run.seed), "run.seed=7") == 0
    assert seen == [7]
    assert exit_code(TrainConfig, lambda config: 3) == 3


def test_a_dry_run_prints_the_resolved_config_only(capsys):
    assert exit_code(TrainConfig, never, "run.dry=true", "algorithm=grpo") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["algorithm"]["_target_"].endswith("GRPOConfig")
    assert printed["env"]["chunks_per_rollout"] == 10  # resolved, not an interpolation
    assert exit_code(EvaluateConfig, never, "run.dry=true", "policy=random") == 0
    assert yaml.safe_load(capsys.readouterr().out)["policy"] == "random"


@pytest.mark.parametrize("error", [PlanError("too few devices"), CheckpointError("foreign")])
def test_input_that_proves_wrong_later_exits_with_2_as_well(capsys, error):
    def work(config):
        raise error

    assert exit_code(TrainConfig, work) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_failure_of_the_work_keeps_its_traceback():
    def work(config):
        raise WorkerError("worker 1 died")

    with pytest.raises(WorkerError):
        main(work, TrainConfig, words=[])


@pytest.mark.parametrize("error", [CheckpointWriteError("the disk is full"), SimulatorCallError("it broke", (1,))])
def test_a_fault_of_the_machine_exits_with_1_so_that_schedulers_try_again(error):
    def work(config: TrainConfig) -> None:
        raise error

    assert exit_code(TrainConfig, work) == 1


def test_an_interrupt_exits_with_130():
    def work(config):
        raise KeyboardInterrupt

    assert exit_code(TrainConfig, work) == 130


@pytest.mark.parametrize("schema", [TrainConfig, EvaluateConfig, MathConfig])
def test_help_lists_every_choice_of_every_group_and_every_key(schema):
    lines = help_text(schema).splitlines()
    for group, preset in groups(schema).items():
        line = next(line for line in lines if line.startswith(f"  {group}={preset.default} "))
        assert [name for name in choices(group, schema) if name not in line] == []
    for key, kind in keys(schema).items():
        assert is_dataclass(kind) or any(line.startswith(f"  {key}=") for line in lines), key
    assert [line.split(maxsplit=1) for line in lines if line.startswith("  cluster.num_devices=")] == [
        ["cluster.num_devices=null", "None: all GPUs, or all cores of a machine without one"]
    ]


def test_a_full_disk_is_one_line_with_what_to_do(capsys):
    error = OSError(errno.ENOSPC, "No space left on device", "runs/x/config.yaml")

    def work(config):
        raise error

    assert exit_code(TrainConfig, work) == 1
    printed = capsys.readouterr().err
    assert "runs/x/config.yaml cannot be written" in printed
    assert "free space" in printed
    assert printed.count("\n") == 1
    error.errno, error.strerror = errno.EACCES, "Permission denied"
    with pytest.raises(OSError, match="Permission denied"):
        main(work, TrainConfig, words=[])


def test_a_command_is_a_function_of_a_config_that_returns_its_summary(tmp_path):
    config = tiny(f"run.dir={tmp_path / 'run'}", "cluster=serial", "run.num_iterations=1")
    summary = train(config)
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["iterations"] == summary["weights_of_iteration"] == 1
    assert "iteration 1/1" in (tmp_path / "run/console.log").read_text()
