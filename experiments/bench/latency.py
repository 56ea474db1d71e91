"""Success over latency of behaviour-cloned flow policies: plain chunks and real-time chunking on the same episodes.

python -m experiments.bench.latency [tasks=maniskill_pick,maniskill_push] [seeds=6301-6303] [delays=0-4]
    [kinds=inference_delay,observation_delay] [episodes=300] [folder=...] [out=...] [overrides]

For each task (a file in configs/env, also with its env.task: metaworld:drawer-open-v3) and seed a `policy=flow_vla` is
cloned that predicts chunks of 10 actions and executes 5; overrides are of this training, those of `eval` of all
evaluations.  It is evaluated with env.rtc=off and env.rtc=linear at each delay, in env steps, of each kind (a key of
env.perturb).  Runs are sequential, each a process on one core.  What `folder` holds already is not run again, so an
interrupted benchmark resumes, and tasks can be run one by one.

Prints a table, and writes <out>.json and <out>.png.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from experiments.bench.harness import REPOSITORY, Benchmark, Child, Run, names_of, table, trained_run
from experiments.bench.harness.curves import Panel, draw_panels
from rlinf_embodied.reporting.seeds import seeds_of
from rlinf_embodied.telemetry.metrics import Rate
from rlinf_embodied.telemetry.paired import PairedRate

TRAINING = ("policy=flow_vla", "env.chunk=10", "env.execute_steps=5", "run.num_iterations=0")
ALONE = ("cluster=serial", "eval.record_video=false", "eval.sampled_episodes=0")
RTC = {"off": "plain chunks", "linear": "real-time chunking"}
Place = tuple[str, str, int]  # a task, a kind of delay, env steps
Solved = dict[str, list[list[bool]]]  # by env.rtc: whether episodes were solved at any time, of each seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    tasks: str = "maniskill_pick,maniskill_push"
    seeds: str = "6301-6303"
    delays: str = "0-4"
    kinds: str = "inference_delay,observation_delay"
    episodes: int = 300
    folder: str = "runs/bench_latency"
    out: str = ""


def evaluated(folder: Path, kind: str, delay: int, rtc: str, episodes: int, words: Sequence[str]) -> list[bool]:
    """Returns which held-out episodes a run folder's policy solves; evaluates it, with `words`, if that is not done."""
    late = f"{kind}-{delay}" if delay else "in_time"  # without a delay all kinds are the same
    place = folder / "latency" / f"{rtc}-{late}-{episodes}"
    if not (place / "eval_info.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        asked = [f"checkpoint={folder}/checkpoints/latest", f"env.rtc={rtc}", f"env.perturb.{kind}={delay}", *ALONE]
        asked += [*words, f"eval.num_episodes={episodes}", f"run.dir={place}"]
        script = str(REPOSITORY / "experiments/evaluate.py")
        Child(f"the evaluation in {place}", [sys.executable, script, *asked], place / "log.txt").wait()
    info = json.loads((place / "eval_info.json").read_text(encoding="utf-8"))
    return [episode["success_once"] > 0 for episode in info["episodes"]]


def rows_of(found: Mapping[Place, Solved]) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    for (task, kind, delay), solved in found.items():
        shown = [", ".join(f"{100 * fmean(seed):.1f}" for seed in solved[rtc]) for rtc in RTC]
        pairs = PairedRate.of(*(list(itertools.chain(*solved[rtc])) for rtc in RTC))
        low, high = (100 * end for end in pairs.interval)
        yield [task, kind, str(delay), *shown, f"{100 * pairs.difference:+.1f} [{low:+.1f}, {high:+.1f}]"]


def panels_of(found: Mapping[Place, Solved]) -> Iterator[Panel]:
    """Yields a panel for each task and kind of delay."""
    for task, kind in dict.fromkeys((task, kind) for task, kind, _ in found):
        points = {delay: solved for (one, other, delay), solved in found.items() if (one, other) == (task, kind)}
        curves = {}
        for rtc, label in RTC.items():
            seeds = zip(*(solved[rtc] for solved in points.values()), strict=True)
            curves[label] = [list(zip(points, (100 * fmean(one) for one in seed), strict=True)) for seed in seeds]
        yield Panel(task, f"{kind}, env steps", "success_once, %", curves)


def measure(asked: Run[Options]) -> None:
    """Clones and evaluates; raises ConfigError for wrong words, and for a folder that holds other trainings."""
    own, found = asked.options, dict[Place, Solved]()
    for task, seed in itertools.product(names_of(own.tasks), seeds_of(own.seeds, "seeds")):
        folder = Path(own.folder).absolute() / task.replace(":", "_") / f"seed_{seed}"
        env, _, name = task.partition(":")
        words = [f"env={env}", *([f"env.task={name}"] if name else []), *TRAINING, *ALONE, "eval.num_episodes=100"]
        trained_run(f"{task}, seed {seed}", folder, [*words, *asked.overrides, f"run.seed={seed}", f"run.dir={folder}"])
        held_out = [word for word in asked.overrides if word.startswith("eval.")]
        for kind, delay in itertools.product(names_of(own.kinds), seeds_of(own.delays, "delays")):
            solved = found.setdefault((task, kind, delay), {rtc: [] for rtc in RTC})
            for rtc in RTC:
                solved[rtc].append(evaluated(folder, kind, delay, rtc, own.episodes, held_out))
        asked.write(content_of(found))
    header = ["task", "kind", "delay", *(f"{label}, %" for label in RTC.values()), "difference, points"]
    print(table(header, list(rows_of(found))))
    draw_panels(list(panels_of(found)), own.out)


def content_of(found: Mapping[Place, Solved]) -> dict[str, object]:
    """Returns the JSON form: rates of each seed."""
    rates = lambda seeds: [Rate(sum(seed), len(seed)).summary("success_once") for seed in seeds]  # noqa: E731
    names = ("task", "kind", "delay")
    return {"curves": [{**dict(zip(names, p)), **{rtc: rates(s[rtc]) for rtc in RTC}} for p, s in found.items()]}  # noqa: B905


BENCHMARK = Benchmark("latency", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    BENCHMARK.main()
