"""Compares every ManiSkill task on the batched CPU backend with stock ManiSkill, bit for bit, and writes a table.

python experiments/sim_coverage.py                                      # everything that has no result yet
python experiments/sim_coverage.py tasks=PickCube-v1,PushT-v1 robots=panda modes=pd_joint_delta_pos out=/tmp/c.json

Every (task, robot, control mode) runs beside stock envs: an episode with actions over the whole range, a partial reset
in its middle, a second episode; see coverage_runs.py.  Each task has a process of its own.  Results go to <out> as they
come, and tasks that are there already are not run again (fresh=true forgets them; named robots or modes are always
run).  A Markdown table lies beside the JSON; what was found for ManiSkill's own tasks goes to envs/batched/covered.json
when covered=true.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_report import machine, split_arguments, use_one_thread_per_process

from rlinf_embodied.errors import ConfigError, RlinfError

OWN = {"tasks": "", "robots": "", "modes": "", "out": "docs/results/coverage.json", "fresh": "", "limit_s": 900}
OWN |= {"covered": "", "worker": "", "into": ""}


def main(arguments: Sequence[str]) -> int:
    """Runs what is missing, task by task."""
    try:
        own, unknown = split_arguments(arguments, OWN)
        if unknown:
            raise ConfigError(f"unknown arguments {' '.join(unknown)}: use {', '.join(OWN)}")
        use_one_thread_per_process()
        if own["worker"]:
            work(str(own["worker"]), named(own["robots"]), named(own["modes"]), Path(str(own["into"])))
            return 0
        return drive(own, list(arguments))
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def named(text: object) -> list[str]:
    return [name for name in str(text).split(",") if name]


def drive(own: dict[str, object], arguments: list[str]) -> int:
    from coverage_runs import chosen_tasks
    from coverage_table import headline, write_covered, write_table

    out, cut = Path(str(own["out"])), bool(own["robots"] or own["modes"])
    results = {} if own["fresh"] == "true" or not out.exists() else json.loads(out.read_text())["tasks"]
    for task in chosen_tasks(named(own["tasks"])):
        if task in results and not cut:
            continue
        start = time.monotonic()
        found = run_worker(task, arguments, int(str(own["limit_s"])))
        found["seconds"] = round(time.monotonic() - start)
        results[task] = merged(results[task], found) if cut and task in results else found
        print(f"{task}: {headline(results[task])} ({found['seconds']} s)", flush=True)
        write(out, arguments, results)
    write(out, arguments, results)
    write_table(out.with_suffix(".md"), json.loads(out.read_text()))
    if own["covered"] == "true":
        write_covered(results)
    return 0


def write(path: Path, arguments: list[str], results: dict) -> None:
    content = {"command": ["python", "experiments/sim_coverage.py", *arguments], **machine(), "tasks": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def merged(old: dict, new: dict) -> dict:
    robots = {**old["robots"]}
    for robot, modes in new["robots"].items():
        robots[robot] = {**robots.get(robot, {}), **modes}
    return {**old, "robots": robots}


def run_worker(task: str, arguments: list[str], limit_s: int) -> dict:
    """Runs a task in a process of its own; what it had found before it died or ran out of time counts."""
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder) / "found.jsonl", Path(folder) / "log"
        command = [sys.executable, __file__, *arguments, f"worker={task}", f"into={into}"]
        with log.open("w") as stream:
            try:
                code = subprocess.run(command, stdout=stream, stderr=stream, timeout=limit_s).returncode
                fate = f"ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                fate = f"had not ended after {limit_s} s"
        lines = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
        found: dict = {"reason": "", "robots": {}}
        for line in lines:
            if "robot" in line:
                found["robots"].setdefault(line.pop("robot"), {})[line.pop("mode")] = line
            else:
                found |= line
        if fate:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            found["reason"] = f"the process {fate}: {' '.join(last)}"[:300]
        return found


def work(task: str, robots: list[str], modes: list[str], into: Path) -> None:
    """Compares one task; one JSON line per result."""
    from coverage_runs import compare_task

    with into.open("w") as stream:
        for line in compare_task(task, robots, modes):
            stream.write(json.dumps(line) + "\n")
            stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
