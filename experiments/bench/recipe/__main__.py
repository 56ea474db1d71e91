"""The demo's recipe on seeds that tuning never saw, each from scratch: success, confidence, time.

python -m experiments.bench.recipe [seeds=1000-1009] [episodes=300] [side_by_side=2] [recipe=pick] [out=...] [overrides]

For every seed the whole of train_vla.py runs with an empty cache: demonstrations, behaviour cloning, evaluation, RL to
its goal, evaluation.  With `keep=<folder>` another recipe of the same seed reuses the behaviour-cloned policy.
`side_by_side` runs share the machine, each in one process on one core; 1 gives every run the whole machine, as `make
demo` does (weights do not depend on that).  Recipes: pick (the demo), table (fast demonstrations, PPO with a low
learning rate), clone (behaviour cloning without RL), frames (the same with a chunk of actions for every env step of a
demonstration, not only for the policy calls); push, pull, window (a teacher that PPO trains on the state takes the
expert's place; the teacher's success is printed first).
`demos=60,120,240` runs the recipe with each of these numbers of demonstrations and the same number of optimizer steps.

Printed and written: success_once and success_at_end before and after with 95 % intervals, env steps, minutes of warm
start and RL, core-minutes of the whole; worst, median and best over the seeds; the processor.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from experiments.bench.harness import Benchmark, Child, Run
from experiments.bench.recipe.outcomes import Outcome, cells, in_order, outcome_of, page
from rlinf_embodied.cluster.hardware import num_cores
from rlinf_embodied.config import EnvConfig, WarmStartConfig
from rlinf_embodied.config.checks import require, require_one_of
from rlinf_embodied.reporting.seeds import seeds_of

EXPERIMENTS = Path(__file__).resolve().parents[2]
RECIPES: dict[str, list[str]] = {
    "pick": ["env=maniskill_pick", "algorithm=ppo_finetune", "run=demo"],
    "table": ["env=maniskill_pick", "algorithm=ppo_finetune", "run.num_iterations=36", "run.until_success=0.995"],
    "clone": ["env=maniskill_pick", "run.num_iterations=0"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """A task without an expert: PPO on the simulator's state is the teacher, of whom a policy is cloned from images."""

    task: str
    teacher: str = ""  # what differs from algorithm=ppo_dense
    student: str = "run=demo"
    num_episodes: int = 240  # of the teacher


_PANDA = "env=maniskill env.options.robot=panda_wristcam env.cameras=[base_camera,hand_camera] env.task="
_WINDOW = "eval.end_at_success=true algorithm.lr_end_fraction=0.1 "
TAUGHT = {
    "push": Taught(task=_PANDA + "PushCube-v1"),
    "pull": Taught(task=_PANDA + "PullCube-v1"),
    "window": Taught(
        task="env=metaworld env.task=window-open-v3 env.horizon=120",
        teacher=_WINDOW + "env.carry_over=true algorithm.gamma=0.95 algorithm.gae_lambda=0.95 env.success_bonus=19 "
        "run.num_iterations=120",
        student=_WINDOW + "env.chunks_per_rollout=24 env.num_envs=64 env.hold_steps=1 policy.noise_repeat=1 "
        "env.reward=dense_delta algorithm.gamma=0.99 env.success_bonus=4 algorithm.lr=3e-4 "
        "warm_start.epochs=20 warm_start.head_epochs=80 run.num_iterations=20 eval.num_envs=16",
        num_episodes=12,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    seeds: str = "1000-1009"
    episodes: int = 300
    side_by_side: int = 2
    recipe: str = "pick"
    demos: str = ""  # numbers of demonstrations; "": the recipe's
    out: str = ""
    keep: str = ""  # folder for run folders and behaviour-cloned policies; "": a temporary one


def commands(
    recipe: str, seed: int, folder: Path, episodes: int, core: int | None, overrides: Sequence[str]
) -> list[list[str]]:
    """Returns the commands of one run; `core`: it shares the machine and has that core for itself."""
    held_out = [
        f"eval.num_episodes={episodes}",
        "eval.sampled_episodes=0",
        "eval.record_video=false",
        "checkpoint.every=0",
    ]
    alone = [] if core is None else ["cluster=serial", "plan=collocated"]

    def script(name: str, into: Path, *words: str) -> list[str]:
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        place = f"out={into}" if name.startswith("export") else f"run.dir={into}"
        return [*pinned, sys.executable, str(EXPERIMENTS / name), *words, f"run.seed={seed}", place]

    if recipe == "frames":  # the expert acts as if the policy were called at every env step; the policy is not
        learner, words = folder / "learner", [*RECIPES["clone"], *held_out, *alone, *overrides]
        every = ["eval.num_episodes=1", "env.execute_steps=1", "env.carry_over=true"]
        learned = f"warm_start.checkpoint={learner}/checkpoints/latest"
        return [
            script("train_vla.py", learner, *words, *every),
            script("train_vla.py", folder / "student", *words, learned),
        ]
    if recipe in RECIPES:
        return [script("train_vla.py", folder, *RECIPES[recipe], *held_out, *alone, *overrides)]
    taught, teacher, data = TAUGHT[recipe], folder / "teacher", folder / "demonstrations"
    task, checkpoint = taught.task.split(), f"checkpoint={teacher}/checkpoints/latest"
    learns = ["policy=state", "algorithm=ppo_dense", "env.cameras=[]", *taught.teacher.split()]
    tuned = ["algorithm=ppo_finetune", *taught.student.split(), f"warm_start.demonstrations={data}"]
    return [
        script("train_vla.py", teacher, *task, *learns, *held_out, *alone),
        script("export_dataset.py", data, *task, checkpoint, f"num_episodes={taught.num_episodes}"),
        script("train_vla.py", folder / "student", *task, *tuned, *held_out, *alone, *overrides),
    ]


def with_demos(number: int, chunks: int = 1) -> list[str]:
    """Returns the overrides for a number of demonstrations: epochs such that as many minibatches are seen as ever.

    Args:
        number: of demonstrations.
        chunks: of actions that a demonstration gives for every policy call.
    """
    usual = WarmStartConfig()
    more = number * chunks / usual.num_demos
    epochs = {name: round(getattr(usual, name) / more) for name in ("epochs", "head_epochs")}
    return [f"warm_start.num_demos={number}", *(f"warm_start.{name}={max(1, value)}" for name, value in epochs.items())]


def run_all(own: Options, overrides: Sequence[str], write: Callable[[Sequence[Outcome]], None]) -> list[Outcome]:
    """Runs every seed and returns the outcomes in the order of the seeds; `write` gets those so far after each run."""
    side_by_side, number_of_cores = own.side_by_side, num_cores()
    rule = f"there are {number_of_cores} cores"
    require(1 <= side_by_side <= number_of_cores, "side_by_side", side_by_side, rule, "use at most so many")
    chunks, usual = (EnvConfig().chunk, WarmStartConfig().num_demos) if own.recipe == "frames" else (1, None)
    numbers: list[int | None] = [*seeds_of(own.demos, "demos")] if own.demos else [usual]
    root = Path(own.keep or tempfile.mkdtemp(prefix="recipe-")).resolve()
    cores, children = SimpleQueue[int | None](), list[Child]()
    for core in sorted(os.sched_getaffinity(0))[:side_by_side]:
        cores.put(core if side_by_side > 1 else None)

    def one(number: int | None, seed: int) -> Outcome:
        folder = root / (f"{own.recipe}-{seed}" + ("" if number is None else f"-{number}"))
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's; it would be resumed
        folder.mkdir(parents=True)
        mine, core, core_s = [*([] if number is None else with_demos(number, chunks)), *overrides], cores.get(), 0.0
        try:
            for k, words in enumerate(commands(own.recipe, seed, folder, own.episodes, core, mine)):
                cache = {"RLINF_EMBODIED_CACHE": str(root / f"cache-{seed}")}  # none shares it
                children.append(Child(f"the run of seed {seed}", words, folder / f"log_{k}.txt", cache))
                core_s += children[-1].wait()
        finally:
            cores.put(core)
        return outcome_of(folder, seed, core_s / 60)

    pool, done = ThreadPoolExecutor(side_by_side), list[Outcome]()
    try:
        runs = [pool.submit(one, number, seed) for seed in seeds_of(own.seeds, "seeds") for number in numbers]
        for run in as_completed(runs):
            done.append(outcome := run.result())
            print(f"{outcome.num_demos} demonstrations | " + " | ".join(cells(outcome)), flush=True)
            write(in_order(done))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.stop()
        pool.shutdown()
        if not own.keep:
            shutil.rmtree(root)
    return in_order(done)


def measure(run: Run[Options]) -> None:
    require_one_of(run.options, "", "recipe", *RECIPES, "frames", *TAUGHT)
    print(page(run_all(run.options, run.overrides, lambda outcomes: run.write({"outcomes": outcomes}))))


BENCHMARK = Benchmark("recipe", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    BENCHMARK.main()
