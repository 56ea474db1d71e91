"""Compares every ManiSkill task on the batched CPU backend with stock ManiSkill, bit for bit.

python -m experiments.bench.coverage [tasks=PickCube-v1,PushT-v1]

The table that the backend looks up (envs/batched/covered.json), what differs by task, robot and control mode ("" for
nothing), is rewritten as results come.  Each task has a separate process, for 15 minutes at most; see runs.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from experiments.bench.harness import names_of
from rlinf_embodied.command_line import main

LIMIT_S = 900.0  # of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    tasks: str = ""  # all where left out


def measure(own: Options) -> None:
    """Compares task by task; results of other versions are forgotten."""
    from envs.batched.build import COVERED, versions
    from experiments.bench.coverage.runs import chosen_tasks

    table = json.loads(COVERED.read_text()) if COVERED.exists() else {}
    tasks = table["tasks"] if table.get("versions") == versions() else {}
    for task in chosen_tasks(names_of(own.tasks)):
        found, fate = run_worker(task)
        tasks.pop(task, None)
        if found:
            tasks[task] = found
        print(f"{task}: {summary(found)}{fate and f' ({fate})'}", flush=True)
        COVERED.write_text(json.dumps({"versions": versions(), "tasks": tasks}, indent=1, sort_keys=True) + "\n")


def summary(found: Mapping[str, Mapping[str, str]]) -> str:
    """Returns how many combinations of robot and control mode are equal."""
    reasons = [reason for modes in found.values() for reason in modes.values()]
    return f"{reasons.count('')} of {len(reasons)} equal"


def run_worker(task: str) -> tuple[dict[str, dict[str, str]], str]:
    """Runs a task in a separate process; its results before it died or ran out of time count.

    Returns:
        what differs by robot and control mode, and what became of the process: "" if it ended by itself.
    """
    from experiments.bench.coverage.runs import write_differences

    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.jsonl"
        process = get_context("spawn").Process(target=write_differences, args=(task, into))
        process.start()
        process.join(LIMIT_S)
        fate = f"the process ended with {process.exitcode}" if process.exitcode else ""
        if process.is_alive():
            process.kill()
            process.join()
            fate = f"the process had not ended after {LIMIT_S:.0f} s"
        found: dict[str, dict[str, str]] = {}
        for line in map(json.loads, into.read_text().splitlines() if into.exists() else ()):
            for robot in line["robots"]:
                found.setdefault(robot, {}).update(dict.fromkeys(line["modes"], line["reason"]))
        return found, fate


if __name__ == "__main__":
    main(measure, Options)
