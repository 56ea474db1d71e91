"""The coverage table: Markdown for readers, and what the batched backend takes from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from envs.batched.choice import COVERED, versions

VERDICTS = ("equal", "fallback", "different", "not in stock", "needs files")
CODE_RUNS = {  # what of a task's own code runs row by row, see envs/batched/single.py
    "nothing": "for all rows at once",
    "initialisation": "episodes initialised row by row",
    "everything": "row by row",
}
HEADER = """# Every ManiSkill task on the batched CPU backend, beside stock ManiSkill

`{command}`, {date}, {processor}, {versions}.

Compared bit for bit: everything in PhysX's state (poses, velocities, joints, drive targets), the reward (the task's
own dense one, normalised, where it has one), all of `evaluate()`, the state observation, after every reset and every
step; with the default control mode the 32 x 32 pictures of all cameras too. Each row of the batch has a stock env
beside it, built anew for every episode and reset with the row's seed. Default control mode: 3 rows, a whole episode
({whole} steps where the horizon is longer), then half as long a second one of every row; one row is reset in the
middle of the first; then 15 steps of 2 rows, and of 32, 3 of them compared. Other control modes: 2 rows, 24 + 12
steps, the stock envs renewed (in a scene without a past) for their later episodes. Actions are drawn from the whole
range and held for five steps, so that arms and legs hit things (*touch*: share of the looked-at steps in which a
robot pushed against something); scripted experts act in the first episode of their tasks. Drawing tasks have 45 dots
of ink instead of 300 or 1010, both sides, and episodes of 40 steps. Tasks that ManiSkill rebuilds at every reset
(`reconfiguration_freq`) run without that on both sides, all rows with the scene of the construction seed. DrawSVG
needs `pip install svgpathtools`, which is not among this project's packages.

*equal*: bit for bit. *fallback*: the plain backend is used instead, by itself, with this reason in the log.
*not in stock*: stock ManiSkill itself raises with this robot or mode. The last column says what of the task's own
code runs row by row (controllers, kinematics, physics and rendering are always those of the batch), and why.
"""


def results_of(task: dict) -> Iterator[tuple[str, str, dict]]:
    """Yields (robot, control mode, result)."""
    for robot, modes in task["robots"].items():
        for mode, result in modes.items():
            yield robot, mode, result


def counts(task: dict) -> Counter:
    """Returns how many (robot, control mode) have which verdict."""
    return Counter(result["verdict"] for _, _, result in results_of(task))


def headline(task: dict) -> str:
    """Returns a task's verdicts in words."""
    found = counts(task)
    parts = [f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict]]
    return ", ".join(parts + [task["reason"]] * bool(task["reason"]))


def write_table(path: Path, content: dict) -> None:
    """Writes the Markdown table."""
    tasks = content["tasks"]
    compared = {name: task for name, task in tasks.items() if counts(task).keys() - {"needs files"}}
    skipped = {name: task for name, task in tasks.items() if name not in compared}
    total = sum((counts(task) for task in compared.values()), Counter())
    lines = [
        HEADER.format(
            command=" ".join(content["command"]),
            date=content["date"].split()[0],
            processor=content["processor"],
            versions=", ".join(f"{name} {value}" for name, value in versions().items()),
            whole=100,
        ),
        f"**{len(compared)} tasks, {total.total()} combinations of task, robot and control mode: "
        + ", ".join(f"{total[verdict]} {verdict}" for verdict in VERDICTS)
        + f".** {len(skipped)} tasks need downloads or packages (below).",
        "",
        "| task | robots (control modes) | verdict | row steps | pictures | touch | the task's own code |",
        "|---|---|---|---|---|---|---|",
        *(_line(name, task) for name, task in compared.items()),
        "",
        "## Details",
        "",
        *_details(compared),
        "",
        "## Not compared",
        "",
        *(f"- {name}: {_reason(task)}" for name, task in skipped.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _reason(task: dict) -> str:
    return task["reason"] or "; ".join({result["reason"]: "" for _, _, result in results_of(task)})


def _line(name: str, task: dict) -> str:
    robots = ", ".join(f"{robot} ({len(modes)})" for robot, modes in task["robots"].items())
    results = [result for _, _, result in results_of(task)]
    looked, touching = (sum(result.get(key, 0) for result in results) for key in ("looked", "touching"))
    ways = Counter(CODE_RUNS[result["alone"]] for result in results if result["verdict"] == "equal")
    ways_text = "; ".join(way if len(ways) == 1 else f"{way} ({count})" for way, count in ways.items())
    cells = [name, robots, headline(task)]
    cells += [f"{sum(result.get('row_steps', 0) for result in results):,}"]
    cells += [str(sum(result.get("pictures", 0) for result in results))]
    cells += [f"{touching / looked:.0%}" if looked else "-", ways_text or "-"]
    return "| " + " | ".join(cells) + " |"


def _details(tasks: dict) -> Iterator[str]:
    """Yields a line per reason, with all that it holds for."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for name, task in tasks.items():
        for robot, mode, result in results_of(task):
            if result["reason"]:
                places.setdefault((name, result["verdict"], result["reason"]), []).append(f"{robot}/{mode}")
            if "short_check" in result and result["short_check"]["alone"] != result["alone"]:
                key = (name, "the short check finds another way", str(result["short_check"]["alone"]))
                places.setdefault(key, []).append(f"{robot}/{mode}")
    for (name, verdict, reason), where in places.items():
        listed = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        yield f"- {name} ({listed}): {verdict}: {reason}"


def write_covered(tasks: dict) -> None:
    """Writes how each combination has to run where envs/batched/choice.py looks it up."""
    table: dict = {}
    for name, task in tasks.items():
        for robot, mode, result in results_of(task):
            if result["verdict"] in ("equal", "fallback"):
                entry = {"alone": result["alone"], "reason": result["reason"] or None}
                names = [robot, "default"] if robot == task.get("default_robot") else [robot]
                for robot_key in names:
                    for mode_key in [mode, "default"] if result.get("default") else [mode]:
                        table.setdefault(name, {}).setdefault(robot_key, {})[mode_key] = entry
    content = {"versions": versions(), "tasks": table}
    COVERED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written to {COVERED}")
