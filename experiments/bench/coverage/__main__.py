"""Compares every ManiSkill task on the batched CPU backend with stock ManiSkill, bit for bit, and writes a table.

python -m experiments.bench.coverage                                      # everything that has no result yet
python -m experiments.bench.coverage tasks=PickCube-v1,PushT-v1 robots=panda modes=pd_joint_delta_pos out=/tmp/c.json

Every (task, robot, control mode) is compared with stock envs: an episode with actions over the whole range, a partial
reset, and a second one; see runs.py.  Each task has a separate process, for `limit_s` seconds at most.
Results go to <out> as they come, and tasks that are there already are not run again (fresh=true forgets them; named
robots or modes are always run).  A Markdown table is written next to the JSON.  What the backend looks up comes from
these results by `python -m experiments.setup.covered`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.coverage.table import headline, page
from experiments.bench.harness import Benchmark, Child, Report, Run, last_lines, names_of

WORKER = ("-m", "experiments.bench.coverage.runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    tasks: str = ""
    robots: str = ""
    modes: str = ""
    out: str = "docs/results/coverage.json"
    fresh: bool = False
    limit_s: int = 900


def measure(run: Run[Options]) -> Report:
    """Runs what is missing, task by task."""
    from experiments.bench.coverage.runs import chosen_tasks

    own = run.options
    out, cut = Path(own.out), bool(own.robots or own.modes)
    results = {} if own.fresh or not out.exists() else json.loads(out.read_text())["tasks"]
    for task in chosen_tasks(names_of(own.tasks)):
        if task in results and not cut:
            continue
        start = time.monotonic()
        found = run_worker(task, own)
        found["seconds"] = round(time.monotonic() - start)
        results[task] = merged(results[task], found) if cut and task in results else found
        print(f"{task}: {headline(results[task])} ({found['seconds']} s)", flush=True)
        run.keep({"tasks": results})
    return Report(content={"tasks": results}, markdown=page(results, run.known))


def merged(old: dict, new: dict) -> dict:
    """Returns a task's results with those of some robots and modes replaced."""
    robots = {**old["robots"]}
    for robot, modes in new["robots"].items():
        robots[robot] = {**robots.get(robot, {}), **modes}
    return {**old, "robots": robots}


def run_worker(task: str, own: Options) -> dict:
    """Runs a task in a separate process; its results before it died or ran out of time count."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.jsonl"
        words = [*WORKER, f"task={task}", f"robots={own.robots}", f"modes={own.modes}", f"into={into}"]
        child = Child(task, words, Path(folder) / "log")
        try:
            code = child.process.wait(own.limit_s)
            fate = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            fate = f"had not ended after {own.limit_s} s"
        found: dict = {"reason": "", "robots": {}}
        for line in map(json.loads, into.read_text().splitlines() if into.exists() else ()):
            if "robot" in line:
                found["robots"].setdefault(line.pop("robot"), {})[line.pop("mode")] = line
            else:
                found |= line
        if fate:
            found["reason"] = f"the process {fate}: {last_lines(child.log, 1)}"[:300]
        return found


BENCHMARK = Benchmark("coverage", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
