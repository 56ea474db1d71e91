"""ManiSkill's own PPO baseline (state, PickCube) on stock CPU envs and on batched ones: curves and times side by side.

python -m experiments.bench.ppo_baseline ppo=<ppo.py> [arms=stock,batched] [out=docs/results/ppo_baseline]
                                         [checkpoint=<a model that an arm has left>] [seed=1 ...]

`ppo` is examples/baselines/ppo/ppo.py of ManiSkill's repository, which its wheel lacks.  Each arm runs that file as it
is, but for three lines: where `make_env` comes from, the two calls that make envs, and the name of the simulation
backend (it says physx_cuda).  Hyperparameters (under the baseline's names) and seed are the same for all arms, one
process, one thread and one core each.  As many arms as there are cores run at the same time, so that whatever else the
machine does disturbs them alike:

    batched   envs.vector.make: N rows in one env object
    stock     N stock env objects in one process, stepped one after the other and stacked.  ManiSkill's documentation
              names gymnasium's AsyncVectorEnv for CPUs: a process per env, far more than there are cores, and without
              the info that the baseline reads.  The work of an env is the same here, less the cost of its process.
    renewed   the same, and every reset recreates the env's scene, as batched rows always do: the
              learning curve is then that of the batched arm, number for number

Writes <out>.json and <out>.md.  The arms' folders, with what they print and their curves for TensorBoard, are in
`folder`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from experiments.bench.harness import ONE_THREAD, Benchmark, Child, Report, Run, Table, chosen, commands
from rlinf_embodied.errors import ConfigError

STOCK = 'functools.partial(vector.make, route="stock", history_free={})'
ARMS = {"batched": "vector.make", "stock": STOCK.format(False), "renewed": STOCK.format(True)}
FLAGS = ("--no-capture-video", "--no-cuda")
LINES = (  # pattern, replacement, how often it is there
    (
        r"^import mani_skill\.envs$",
        "import mani_skill.envs\nimport functools\nfrom envs import vector\nmake_env = {make}",
        1,
    ),
    (r'sim_backend="physx_cuda"', 'sim_backend="physx_cpu"', 1),
    (r"^(    (?:eval_)?envs = )gym\.make\(args\.env_id, num_envs=", r"\g<1>make_env(args.env_id, num_envs=", 2),
)
COMMIT = "dcb8721e572f838af1b53823600d4ab5248fefe2"
CURVES = ("train/success_once", "train/return", "eval/success_once", "eval/return")
LAST = ("eval/success_once", "eval/return")  # of which the last value is shown
HEADER = (
    "arm",
    "env steps/s in rollouts",
    "rollouts s",
    "updates s",
    "all s",
    *(f"{tag}, last" for tag in LAST),
)
Scalar = tuple[int, float, float]  # env steps, seconds since the first one, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """What the baseline is run with, under its names."""

    env_id: str = "PickCube-v1"
    control_mode: str = "pd_ee_delta_pos"
    total_timesteps: int = 800_000
    seed: int = 1
    num_envs: int = 64
    num_steps: int = 50
    num_minibatches: int = 16
    update_epochs: int = 4
    learning_rate: str = "3e-4"
    gamma: str = "0.8"
    num_eval_envs: int = 16
    eval_freq: int = 25

    def settings(self) -> dict[str, object]:
        """Returns them by name."""
        return {field.name: getattr(self, field.name) for field in fields(Hyperparameters)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Hyperparameters):
    """The arguments."""

    ppo: str = ""
    arms: str = "stock,batched"
    out: str = ""
    folder: str = "runs/ppo_baseline"
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm gave."""

    seconds: float  # from the first step to the end, evaluations included
    rollout_s: float
    update_s: float
    env_steps: int
    curves: dict[str, list[Scalar]]

    def row(self) -> tuple[str, ...]:
        """Returns its cells of the table; env steps per second include the policy's forward passes."""
        last = [f"{curve[-1][2]:.3f}" if curve else "-" for curve in (self.curves[tag] for tag in LAST)]
        seconds = [f"{value:.0f}" for value in (self.rollout_s, self.update_s, self.seconds)]
        return f"{self.env_steps / self.rollout_s:.0f}", *seconds, *last


def adapted(text: str, make: str) -> str:
    """Returns the baseline with the lines of the env replaced; `make` is the expression that stands for gym.make.

    Raises:
        ConfigError: it does not have the known lines.
    """
    for pattern, replacement, count in LINES:
        text, found = re.subn(pattern, replacement.replace("{make}", make), text, flags=re.MULTILINE)
        if found != count:
            raise ConfigError(
                f"ppo has {found} lines like {pattern!r}, but {count} are known: give examples/baselines/ppo/ppo.py of "
                f"ManiSkill's repository at commit {COMMIT}"
            )
    return text


def started(name: str, text: str, own: Options, core: int) -> Child:
    """Starts an arm on a core of its own."""
    folder = Path(own.folder).resolve() / f"{name}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(parents=True)
    script = folder / "ppo.py"
    script.write_text(adapted(text, ARMS[name]), encoding="utf-8")
    settings = own.settings() | {"exp_name": name}
    settings |= {"checkpoint": Path(own.checkpoint).resolve()} if own.checkpoint else {}
    command = [sys.executable, str(script), *(f"--{key}={value}" for key, value in settings.items()), *FLAGS]
    arm = Child(f"arm {name}", command, folder / "log.txt", dict.fromkeys(ONE_THREAD, "1"), cwd=folder)
    os.sched_setaffinity(arm.process.pid, {core})
    print(f"{name}: {own.total_timesteps} steps on core {core}, see {arm.log}", flush=True)
    return arm


def train(names: Sequence[str], text: str, own: Options) -> dict[str, Outcome]:
    """Runs arms to their ends, as many at a time as there are cores.

    Raises:
        WorkerError: one failed; the others of its time were ended.
    """
    cores, found = sorted(os.sched_getaffinity(0)), {}
    for first in range(0, len(names), len(cores)):
        arms = {name: started(name, text, own, core) for name, core in zip(names[first:], cores, strict=False)}
        try:
            for name, arm in arms.items():
                arm.wait()
                found[name] = outcome(read_scalars(arm.log.parent / "runs" / name))
        finally:
            for arm in arms.values():
                arm.stop()
    return found


def read_scalars(folder: Path) -> dict[str, list[Scalar]]:
    """Returns what a run wrote for TensorBoard, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    start = min(several[0].wall_time for several in found.values())
    return {tag: [(e.step, e.wall_time - start, e.value) for e in several] for tag, several in found.items()}


def outcome(scalars: Mapping[str, list[Scalar]]) -> Outcome:
    """Returns curves and times of a run."""
    rollout, update = scalars["time/rollout_time"], scalars["time/update_time"]
    return Outcome(
        seconds=rollout[-1][1],
        rollout_s=sum(value for *_, value in rollout),
        update_s=sum(value for *_, value in update),
        env_steps=rollout[-1][0],
        curves={tag: list(scalars.get(tag, ())) for tag in CURVES},
    )


def comparison(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Returns what is to be said of every other arm beside the batched one."""
    ours = outcomes.get("batched")
    lines = []
    for name, arm in outcomes.items():
        if ours is None or arm is ours:
            continue
        same = all([p[::2] for p in ours.curves[tag]] == [p[::2] for p in arm.curves[tag]] for tag in CURVES)
        curve = "the same learning curve, number for number" if same else "another learning curve"
        lines.append(
            f"batched / {name}: rollouts {arm.rollout_s / ours.rollout_s:.2f} times, the whole run "
            f"{arm.seconds / ours.seconds:.2f} times as fast; {curve}"
        )
    return lines


def measure(run: Run[Options]) -> Report:
    """Runs the arms and compares them."""
    own = run.options
    if not own.ppo:
        raise ConfigError("ppo is missing: give ppo=<ppo.py>, examples/baselines/ppo/ppo.py of ManiSkill's repository")
    arms = chosen(own.arms, ARMS, "arms")
    try:
        text = Path(own.ppo).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"ppo is {own.ppo!r}, which cannot be read ({error}): give the baseline's file") from error
    adapted(text, "")  # before hours of work
    outcomes = train(list(arms), text, own)
    table = Table(HEADER, [(name, *arm.row()) for name, arm in outcomes.items()])
    page = [
        "# ManiSkill's PPO baseline on CPU envs",
        f"{commands('ppo_baseline', run.known)}: "
        + ", ".join(f"{key} {value}" for key, value in own.settings().items())
        + "; otherwise the baseline's defaults, without videos. One process, one thread and one core per arm, at the "
        "same time; the script describes the arms. Evaluations are greedy.",
        table.markdown(),
        *(f"{line}." for line in comparison(outcomes)),
    ]
    return Report(
        content={"settings": own.settings(), "arms": outcomes},
        text="\n".join([table.markdown(), *comparison(outcomes)]),
        markdown="\n\n".join(page),
    )


BENCHMARK = Benchmark("ppo_baseline", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
