"""ManiSkill's own PPO baseline (state, PickCube) on stock CPU envs and on batched ones: curves and times side by side.

python experiments/bench_ppo_baseline.py ppo=<ppo.py> [arms=stock,batched] [out=docs/results/ppo_baseline]
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
    renewed   the same, and every reset gives the env a physics without a past, as batched rows always have: the
              learning curve is then that of the batched arm, number for number

Writes <out>.json, <out>.md and <out>.png.  The arms' folders, with what they print, are in `folder`.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_report import ONE_THREAD, chosen, machine, markdown, split_arguments, write_results

from rlinf_embodied.errors import ConfigError, RlinfError, WorkerError

HYPERPARAMETERS: dict[str, object] = {
    "env_id": "PickCube-v1",
    "control_mode": "pd_ee_delta_pos",
    "total_timesteps": 800_000,
    "seed": 1,
    "num_envs": 64,
    "num_steps": 50,
    "num_minibatches": 16,
    "update_epochs": 4,
    "learning_rate": "3e-4",
    "gamma": "0.8",
    "num_eval_envs": 16,
    "eval_freq": 25,
}
OWN = {
    "ppo": "",
    "arms": "stock,batched",
    "out": "",
    "folder": "runs/ppo_baseline",
    "checkpoint": "",
    **HYPERPARAMETERS,
}
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
SOLVED = 0.9  # success in training
WINDOWS = 40  # that a curve of training episodes is averaged over
Scalar = tuple[int, float, float]  # env steps, seconds since the first one, value


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm gave."""

    seconds: float  # from the first step to the end, evaluations included
    rollout_s: float
    update_s: float
    env_steps: int
    curves: dict[str, list[Scalar]]

    @property
    def speed(self) -> float:
        """Env steps per second of rollout, the policy's forward passes included."""
        return self.env_steps / self.rollout_s

    def solved_at(self) -> Scalar | None:
        """Returns the first point of the averaged training curve with a success of SOLVED."""
        return next((point for point in averaged(self.curves["train/success_once"]) if point[2] >= SOLVED), None)


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


def command(script: Path, own: Mapping[str, object], name: str) -> list[str]:
    """Returns the command of an arm."""
    settings = {key: own[key] for key in HYPERPARAMETERS} | {"exp_name": name}
    settings |= {"checkpoint": Path(str(own["checkpoint"])).resolve()} if own["checkpoint"] else {}
    return [sys.executable, str(script), *(f"--{key}={value}" for key, value in settings.items()), *FLAGS]


@dataclass(slots=True)
class Arm:
    """An arm that is under way."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder / "log.txt"

    def result(self) -> Outcome:
        """Waits for its end.

        Raises:
            WorkerError: it failed.
        """
        code = self.process.wait()
        if code:
            last = "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-5:])
            raise WorkerError(f"arm {self.name} ended with exit code {code}, see {self.log}:\n{last}")
        return outcome(read_scalars(self.folder / "runs" / self.name))


def started(name: str, text: str, own: Mapping[str, object], core: int) -> Arm:
    """Starts an arm on a core of its own."""
    folder = Path(str(own["folder"])).resolve() / f"{name}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(parents=True)
    script = folder / "ppo.py"
    script.write_text(adapted(text, ARMS[name]), encoding="utf-8")
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **dict.fromkeys(ONE_THREAD, "1")}
    with (folder / "log.txt").open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command(script, own, name), cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
        )
    os.sched_setaffinity(process.pid, {core})
    arm = Arm(name, folder, process)
    print(f"{name}: {own['total_timesteps']} steps on core {core}, see {arm.log}", flush=True)
    return arm


def run(names: Sequence[str], text: str, own: Mapping[str, object]) -> dict[str, Outcome]:
    """Runs arms to their ends, as many at a time as there are cores.

    Raises:
        WorkerError: one failed; the others of its time were ended.
    """
    cores, found = sorted(os.sched_getaffinity(0)), {}
    for first in range(0, len(names), len(cores)):
        arms = [started(name, text, own, core) for name, core in zip(names[first:], cores, strict=False)]
        try:
            found |= {arm.name: arm.result() for arm in arms}
        finally:
            for arm in arms:
                arm.process.kill()  # nothing happens to one that has ended
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


def averaged(curve: Sequence[Scalar]) -> list[Scalar]:
    """Returns means over WINDOWS equal parts of the points of a curve, at the last point of each part."""
    width = max(1, len(curve) // WINDOWS)
    parts = [curve[start : start + width] for start in range(0, len(curve) - width + 1, width)]
    return [(*part[-1][:2], statistics.fmean(value for *_, value in part)) for part in parts]


def rows(outcomes: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """Returns the lines of the table."""
    lines = []
    for name, arm in outcomes.items():
        solved, trained, evaluated = (
            arm.solved_at(),
            averaged(arm.curves["train/success_once"]),
            arm.curves["eval/success_once"],
        )
        lines.append(
            (
                name,
                f"{arm.speed:.0f}",
                f"{arm.rollout_s:.0f}",
                f"{arm.update_s:.0f}",
                f"{arm.seconds:.0f}",
                f"{trained[-1][2]:.3f}" if trained else "-",
                f"{evaluated[-1][2]:.3f}" if evaluated else "-",
                f"{solved[0]:,} / {solved[1]:.0f} s" if solved else "not reached",
            )
        )
    return lines


HEADER = (
    "arm",
    "env steps/s in rollouts",
    "rollouts s",
    "updates s",
    "all s",
    "train/success_once at the end",
    "eval/success_once, last",
    f"train/success_once of {SOLVED:g} at",
)


def comparison(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Returns what is to be said of every other arm beside the batched one."""
    ours = outcomes.get("batched")
    if ours is None:
        return []
    lines = []
    for name, arm in outcomes.items():
        if arm is not ours:
            same = all(
                [point[::2] for point in ours.curves[t]] == [point[::2] for point in arm.curves[t]] for t in CURVES
            )
            curve = "the same learning curve, number for number" if same else "another learning curve, see the picture"
            lines.append(
                f"batched / {name}: rollouts {arm.rollout_s / ours.rollout_s:.2f} times, the whole run "
                f"{arm.seconds / ours.seconds:.2f} times as fast; {curve}"
            )
    return lines


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draws success and return of training episodes, and of evaluations as dots, against env steps and seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for line, tag in enumerate(("success_once", "return")):
        for column, (unit, scale) in enumerate((("env steps / 1000", 1e3), ("seconds", 1.0))):
            for number, (name, arm) in enumerate(outcomes.items()):
                axis, colour = axes[line][column], f"C{number}"
                trained, evaluated = averaged(arm.curves[f"train/{tag}"]), arm.curves[f"eval/{tag}"]
                axis.plot([p[column] / scale for p in trained], [p[2] for p in trained], color=colour, label=name)
                axis.plot([p[column] / scale for p in evaluated], [p[2] for p in evaluated], "o", color=colour)
                axis.set(xlabel=unit, ylabel=tag)
    axes[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def write(out: str, outcomes: Mapping[str, Outcome], own: Mapping[str, object], arguments: Sequence[str]) -> None:
    """Writes JSON, Markdown and picture, unless `out` is empty."""
    if not out:
        return
    settings = {key: own[key] for key in HYPERPARAMETERS}
    arms = {name: asdict(arm) for name, arm in outcomes.items()}
    known = {"benchmark": "ppo_baseline", "arguments": arguments, "machine": machine(), "settings": settings}
    write_results(f"{out}.json", known | {"arms": arms})
    draw(outcomes, Path(f"{out}.png"))
    text = [
        "# ManiSkill's PPO baseline on CPU envs",
        f"`python experiments/bench_ppo_baseline.py {' '.join(arguments)}`: "
        + ", ".join(f"{key} {value}" for key, value in settings.items())
        + "; otherwise the baseline's defaults, without videos. One process, one thread and one core per arm, at the "
        "same time; the script describes the arms. Lines are training episodes (sampled actions), dots greedy ones.",
        markdown(HEADER, rows(outcomes)),
        *(f"{line}." for line in comparison(outcomes)),
        f"![curves]({Path(out).name}.png)",
    ]
    Path(f"{out}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    try:
        own, unknown = split_arguments(arguments, OWN)
        if unknown or not own["ppo"]:
            raise ConfigError(f"arguments are {' '.join(arguments)!r}: give ppo=<ppo.py>, and any of {', '.join(OWN)}")
        arms = chosen(str(own["arms"]), ARMS)
        text = Path(str(own["ppo"])).read_text(encoding="utf-8")
        adapted(text, "")  # before hours of work
        outcomes = run(list(arms), text, own)
    except (RlinfError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(HEADER, rows(outcomes)), *comparison(outcomes), sep="\n")
    write(str(own["out"]), outcomes, own, [argument for argument in arguments if not argument.startswith("folder=")])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
