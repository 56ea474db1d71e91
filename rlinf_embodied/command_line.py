"""What every script does around its work: read the command line, print help or the resolved config, exit truly.

Exit codes: 0 done, 1 the work failed, 2 the input was wrong; 130, 143, 129 stopped by Ctrl-C, SIGTERM, SIGHUP.
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from rlinf_embodied import portable
from rlinf_embodied.compose import (
    CONTROL_GROUPS,
    EVALUATE_GROUPS,
    EXPORT_GROUPS,
    MATH_GROUPS,
    PLANNING_GROUPS,
    SFT_GROUPS,
    TRAIN_GROUPS,
    choices,
    compose_answers,
    compose_control,
    compose_emulation,
    compose_evaluate,
    compose_export,
    compose_math,
    compose_planning,
    compose_sft,
    compose_train,
    keys,
    to_yaml,
)
from rlinf_embodied.config import (
    ControlConfig,
    EmulationConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    Exactness,
    ExportConfig,
    ImitationConfig,
    MathConfig,
    PlanningConfig,
    RunConfig,
    TrainConfig,
)
from rlinf_embodied.embodied.starting_point import may_resume, require_start
from rlinf_embodied.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ObjectiveError,
    PlanError,
    PlugInError,
    RunFileError,
    SimulatorError,
)
from rlinf_embodied.stop_signals import Stopped, ends_at_once

# the input was wrong, not the machine
USAGE_ERRORS = (ConfigError, DataError, PlanError, CheckpointError, SimulatorError)
MAIN_OVERRIDES = {
    TrainConfig: {
        "env.task=StackCube-v1": "any ManiSkill task id (with env=maniskill)",
        "env.num_envs=64": "rows over all workers, a multiple of env.block_size",
        "run.dir=runs/mine": "the run folder",
        "run.seed=0": "everything that is drawn follows from it",
        "run.num_iterations=60": "iterations of RL",
        "run.dry=true": "print the resolved config and stop",
        "warm_start.checkpoint=<dir>": "start from a checkpoint folder instead of cloning the scripted expert",
        "warm_start.demonstrations=<path>": "clone a ManiSkill trajectory file (.h5) or a LeRobot v3 folder",
        "warm_start.teacher=<dir>": "clone a policy on the simulator's state (policy=state algorithm=ppo_dense)",
        "warm_start.num_demos=160": "demonstrations of the scripted expert",
        "eval.num_episodes=200": "held-out episodes, before and after",
        "checkpoint.every=10": "iterations between checkpoints",
        "resume=auto": "auto: go on where run.dir stopped; never: refuse a used folder; <path>: a checkpoint folder",
        "plan=auto": "profile the stages (cached), plan, run the best plan; or force a preset, or plan=<file.yaml>",
        "cluster.num_devices=1": "use fewer devices than the machine has",
    },
    ImitationConfig: {
        "data=runs/pick.h5": "a ManiSkill trajectory file or a LeRobot v3 folder; several of them joined by commas",
        "env.task=StackCube-v1": "any ManiSkill task id (with env=maniskill)",
        "sft.checkpoint=<dir>": "start from a policy folder, such as <run.dir>/checkpoints/latest; else random weights",
        "sft.epochs=7": "epochs of the whole policy",
        "sft.head_epochs=38": "then, of everything but the stem",
        "sft.lr=1e-3": "learning rate; sft.head_lr of the second phase",
        "sft.schedule=one_cycle": "cosine, linear or constant",
        "sft.held_out=0.1": "share of the episodes whose loss is only looked at; it chooses the checkpoint",
        "run.dir=runs/sft": "the run folder",
        "run.seed=0": "everything that is drawn follows from it",
        "run.dry=true": "print the resolved config and stop",
        "eval.num_episodes=200": "held-out episodes in the simulator, before and after",
        "eval.every=10": "epochs between evaluations on the way",
        "checkpoint.every=10": "epochs between checkpoints",
        "resume=auto": "auto: go on where run.dir stopped; never: refuse a used folder; <path>: a checkpoint folder",
        "cluster.num_devices=1": "use fewer devices than the machine has",
    },
    ControlConfig: {
        "env.id=HalfCheetah-v5": "any Gymnasium env with real actions (with env=gymnasium)",
        "algorithm.updates_per_step=1": "updates of the critics per env step",
        "algorithm.batch_size=256": "transitions of an update, an equal part of every block",
        "algorithm.warmup_steps=1000": "env steps of uniform actions before the first update",
        "algorithm.capacity=1000000": "transitions of the replay buffer, which is part of every checkpoint",
        "algorithm.gamma=0.99": "discount per env step; algorithm.tau of the target critics",
        "run.dir=runs/control": "the run folder",
        "run.seed=0": "everything that is drawn follows from it",
        "run.num_iterations=1000": "each of env.num_envs x env.chunks_per_rollout env steps",
        "run.dry=true": "print the resolved config and stop",
        "warm_start.checkpoint=<dir>": "start from a folder of the same policy instead of random weights",
        "eval.every=100": "iterations between evaluations on the way",
        "checkpoint.every=200": "iterations between checkpoints",
        "resume=auto": "auto: go on where run.dir stopped; never: refuse a used folder; <path>: a checkpoint folder",
        "plan=auto": "profile the stages (cached), plan, run the best plan; or force a preset, or plan=<file.yaml>",
        "cluster.num_devices=1": "use fewer devices than the machine has",
    },
    ExportConfig: {
        "checkpoint=<dir>": "whose policy acts, for example runs/demo/checkpoints/latest",
        "policy=expert": "the scripted expert instead of a checkpoint",
        "out=runs/pick.h5": "a trajectory file of ManiSkill (and its .json); or out=<new folder>, a LeRobot v3 dataset",
        "num_episodes=100": "episodes that are run; training's seeds, never those of evaluation",
        "successes_only=false": "write episodes that fail, too",
        "greedy=false": "sample at the policy's temperature",
        "video=true": "of a LeRobot folder: pictures as videos instead of PNG",
        "env.cameras=[base_camera]": "cameras of a LeRobot folder, where the acting policy sees none",
        "run.seed=1": "other initial states",
    },
    MathConfig: {
        "algorithm=ppo": "grpo, dr_grpo, dapo, rloo, or ppo with a critic of its own",
        "data.level=linear2-20": "generated problems: sum4-6-9, chain2-3, linear2-20, countdown3-9, joined by commas",
        "data.files.all=problems.jsonl": "JSON Lines with question and answer; or data.files.train and .test",
        "reward._target_=my_rewards.score": "one's own (completion, problem) -> float, see docs/reasoning.md",
        "policy.folder=<dir>": "a Hugging Face model folder instead of the small model from scratch",
        "policy.lora.rank=16": "train low-rank adapters only",
        "generation.max_new_tokens=52": "where a completion is cut off; 512 where data.prompt_template is natural",
        "algorithm.lr=1e-4": "learning rate; 1e-6 for a model folder, 1e-5 for its adapters",
        "warm_start.chain_of_thought_share=1.0": "of the examples that the small model is fine-tuned on",
        "run.dir=runs/math": "the run folder",
        "run.seed=0": "everything that is drawn follows from it, the held-out problems apart (data.seed)",
        "run.num_iterations=60": "iterations of RL",
        "run.dry=true": "print the resolved config and stop",
        "eval.num_problems=1000": "held-out problems, before and after",
        "checkpoint.every=10": "iterations between checkpoints",
        "resume=auto": "auto: go on where run.dir stopped; never: refuse a used folder; <path>: a checkpoint folder",
        "plan=auto": "profile the stages (cached), plan, run the best plan; or force a preset, or plan=<file.yaml>",
        "cluster.num_devices=1": "use fewer devices than the machine has",
    },
    EvaluateConfig: {
        "checkpoint=<dir>": "what to evaluate, for example runs/demo/checkpoints/latest; its workflow decides the rest",
        "data.files.all=problems.jsonl": "of a language model: other problems; a plain Hugging Face folder does, too",
        "eval.num_samples=8": "of a language model: answers per problem, for pass@k (with eval.num_problems)",
        "policy=expert": "the scripted expert instead of a checkpoint; or policy=random",
        "eval.num_episodes=100": "held-out episodes",
        "eval.record_video=false": "no videos; else the first eval.num_videos episodes are filmed",
        "eval.greedy=false": "sample at the policy's temperature",
        "allow_mismatch=true": "evaluate although the checkpoint was made under other conditions",
        "run.dir=runs/evaluation": "where eval_info.json and the videos go",
    },
    PlanningConfig: {
        "profile=maniskill_openvla": "what the stages cost: a file under configs/profiles, or a path to a .json file",
        "workflow=embodied": "or reasoning; the profile knows it too",
        "cluster=h100x8": "local, h100x64, mixed, or a path to a .yaml file of the form of configs/cluster/emulated_*",
        "num_items=512": "more or less work than in the profile",
        "num_ranked=8": "plans that are shown",
        "model=openvla_7b": "plan this model's memory instead: configs/models, a config.json or its folder",
        "memory.num_devices=[1,2,4,8]": "with model: devices that it is spread over",
        "memory.device_gb=80": "with model: the memory of each of them",
        "memory.lora_rank=32": "with model: of the adapters; 0: full fine-tuning only",
        "run.dir=runs/plan": "where plan.json, plan.png and trace.json go; with model: memory.json and memory.md",
    },
    EmulationConfig: {
        "profile=maniskill_openvla": "what the stages cost: a file under configs/profiles, or a path to a .json file",
        "cluster=h100x8": "h100x64, mixed, or a path to a .yaml file of the form of configs/cluster/emulated_*",
        "plan=auto": "or all, temporal, hybrid, spatial, or a plan file such as runs/plan/plan.json",
        "run.num_iterations=3": "iterations that are measured, after one that is not",
        "time_scale=0.02": "wall seconds per emulated second; left out: as fast as this machine keeps up with",
        "out=emulated.json": "where the results go",
    },
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_TEMPORARY = "No usable temporary directory"
# commands whose numbers are to be the same everywhere
_COMPUTING = (TrainConfig, ControlConfig, ImitationConfig, MathConfig, EvaluateConfig, ExportConfig)


class HasRun(Protocol):
    """A config with a run section."""

    run: RunConfig


_Config = TypeVar("_Config", bound=HasRun)


def train_main(entry: Callable[[TrainConfig], int | None]) -> NoReturn:
    """Runs a training script: `main` with TrainConfig."""
    main(entry, _compose_training, TrainConfig, TRAIN_GROUPS)


def _compose_training(overrides: Sequence[str]) -> TrainConfig:
    config = compose_train(overrides)
    if not may_resume(config):
        require_start(config)
    return config


def sft_main(entry: Callable[[ImitationConfig], int | None]) -> NoReturn:
    """Runs the script of supervised fine-tuning: `main` with ImitationConfig."""
    main(entry, compose_sft, ImitationConfig, SFT_GROUPS)


def control_main(entry: Callable[[ControlConfig], int | None]) -> NoReturn:
    """Runs the script of learning from transitions: `main` with ControlConfig."""
    main(entry, compose_control, ControlConfig, CONTROL_GROUPS)


def export_main(entry: Callable[[ExportConfig], int | None]) -> NoReturn:
    """Runs the script that writes datasets: `main` with ExportConfig."""
    main(entry, compose_export, ExportConfig, EXPORT_GROUPS)


def math_main(entry: Callable[[MathConfig], int | None]) -> NoReturn:
    """Runs a training script of the reasoning workflow: `main` with MathConfig."""
    main(entry, compose_math, MathConfig, MATH_GROUPS)


def evaluate_main(entry: Callable[[EvaluateConfig | EvaluateAnswersConfig], int | None]) -> NoReturn:
    """Runs an evaluation script: `main` with the config that fits the checkpoint's workflow."""
    main(entry, _compose_evaluation, EvaluateConfig, EVALUATE_GROUPS)


def _compose_evaluation(overrides: Sequence[str]) -> EvaluateConfig | EvaluateAnswersConfig:
    answers = compose_answers(overrides)
    if answers is None:
        _require_folder(overrides)
    return answers or compose_evaluate(overrides)


def _require_folder(overrides: Sequence[str]) -> None:
    """Checks that the checkpoint is there: its workflow decides which keys are known.

    Raises:
        ConfigError: it is not.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        folder = Path(value.strip("'\"")).expanduser()
        if key == "checkpoint" and not folder.is_dir():
            raise ConfigError(
                f"checkpoint is {str(folder)!r}, but there is no such folder: give a checkpoint folder, for example "
                "<run.dir>/checkpoints/latest, or a Hugging Face folder of a causal language model"
            )


def planning_main(entry: Callable[[PlanningConfig], int | None]) -> NoReturn:
    """Runs the planning script: `main` with PlanningConfig."""
    main(entry, compose_planning, PlanningConfig, PLANNING_GROUPS)


def emulation_main(entry: Callable[[EmulationConfig], int | None]) -> NoReturn:
    """Runs the emulation script: `main` with EmulationConfig."""
    main(entry, compose_emulation, EmulationConfig, ())


def main(
    entry: Callable[[_Config], int | None],
    compose: Callable[[Sequence[str]], _Config],
    schema: type[_Config],
    groups: Sequence[str],
) -> NoReturn:
    """Composes the config from `sys.argv`, runs `entry` with it and exits; see the module for the exit codes.

    `entry` imports what is heavy itself, so that a typing error is answered at once.  It returns an exit code, None
    for 0.
    """
    script, *overrides = sys.argv
    if {"-h", "--help"} & set(overrides):
        print(help_text(script, schema, groups))
        sys.exit(0)
    try:
        with ends_at_once():
            sys.exit(_run(entry, compose(overrides), schema, overrides))
    except USAGE_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _FULL and _NO_TEMPORARY not in str(error):
            raise
        where = error.filename or "a file of this run"
        print(
            f"error: {where} cannot be written ({error.strerror}): free space on the disks of run.dir, the cache and "
            "temporary files (TMPDIR moves those), then give the same command again",
            file=sys.stderr,
        )
        sys.exit(1)
    except (PlugInError, ObjectiveError, RunFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as error:
        stop = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)


def _run(entry: Callable[[_Config], int | None], config: _Config, schema: type[_Config], words: Sequence[str]) -> int:
    if config.run.dry:
        print(to_yaml(config), end="")
        return 0
    if schema in _COMPUTING:
        _pin(config.run, words)
    return entry(config) or 0


def _pin(run: RunConfig, overrides: Sequence[str]) -> None:
    """Pins the process before torch is imported; where it cannot be pinned and nobody asked for it, exact must do."""
    if run.exact is not Exactness.portable:
        return
    try:
        portable.pin()
    except ConfigError as error:
        if any(text.startswith("run.exact=") for text in overrides):
            raise
        run.exact = Exactness.exact
        print(f"note: {error} (which is done now)", file=sys.stderr)


def help_text(script: str, schema: type, groups: Sequence[str]) -> str:
    """Returns usage, the groups with their choices, the overrides most used, and the names of all keys."""
    width = max(map(len, MAIN_OVERRIDES[schema])) + 2
    lines = [f"usage: python {script} [group=choice ...] [key=value ...]"]
    lines += ["", "groups:"] if groups else []
    lines += [f"  {group:<{width}}{' | '.join(choices(group, schema))}" for group in groups]
    lines += ["", "overrides most used:"]
    lines += [f"  {text:<{width}}{meaning}" for text, meaning in MAIN_OVERRIDES[schema].items()]
    lines += ["", "all keys (defaults and their meaning: rlinf_embodied/config/):"]
    known = keys(schema)
    sections = [entry.name for entry in fields(schema) if any(key.startswith(f"{entry.name}.") for key in known)]
    for section in sections:
        inside = [key.removeprefix(f"{section}.") for key in known if key.startswith(f"{section}.")]
        lines.append(f"  {section}.: {' '.join(inside)}")
    return "\n".join(lines)
