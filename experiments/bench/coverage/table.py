"""The coverage table in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.bench.harness import Table, command_text

COLUMNS = ("task", "robots (control modes)", "verdict", "row steps", "pictures", "touch")
VERDICTS = ("equal", "fallback", "different", "not in stock", "needs files")
HEADER = """# Every ManiSkill task on the batched CPU backend, compared with stock ManiSkill

{command}, {date}, {processor}, {versions}.

Compared bit for bit: everything in PhysX's state (poses, velocities, joints, drive targets), the reward (the task's
own dense one, normalised, where it has one), all of `evaluate()`, the state observation, after every reset and every
step; with the default control mode the 32 x 32 pictures of all cameras too. Each row is compared with a stock
env, built again for every episode and reset with the row's seed. Default control mode: 3 rows, a whole episode
(100 steps where the horizon is longer), then half as long a second one of every row; one row is reset in the
middle of the first; then 15 steps of 2 rows, and of 32, 3 of them compared. Other control modes: 2 rows, 24 + 12
steps, the stock envs renewed (their scene is recreated) for their later episodes. Actions are drawn from the whole
range and held for five steps, so that arms and legs hit things (*touch*: share of the looked-at steps in which a
robot pushed against something); scripted experts act in the first episode of their tasks. Drawing tasks have 45 dots
of ink instead of 300 or 1010, both sides, and episodes of 40 steps. Tasks that ManiSkill rebuilds at every reset
(`reconfiguration_freq`) run without that on both sides, all rows with the scene of the construction seed. DrawSVG
needs `pip install svgpathtools`, which is not among this project's packages.

*equal*: bit for bit. *fallback*: the plain backend is used instead, by itself, with this reason in the log.
*not in stock*: stock ManiSkill itself raises with this robot or mode.
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


def page(tasks: Mapping[str, dict], run: Mapping[str, Any]) -> str:
    """Returns the page of all results; `run` is what is known of the run: arguments and machine."""
    compared = {name: task for name, task in tasks.items() if counts(task).keys() - {"needs files"}}
    skipped = {name: task for name, task in tasks.items() if name not in compared}
    total = sum((counts(task) for task in compared.values()), Counter())
    verdicts = ", ".join(f"{total[verdict]} {verdict}" for verdict in VERDICTS)
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("mani_skill", "sapien"))
    header = {"date": machine["date"].split()[0], "processor": machine["processor"], "versions": versions}
    lines = [
        HEADER.format(command=command_text("coverage", run), **header),
        f"**{len(compared)} tasks, {total.total()} combinations of task, robot and control mode: {verdicts}.** "
        f"{len(skipped)} tasks need downloads or packages (below).",
        "",
        Table(COLUMNS, [_row(name, task) for name, task in compared.items()]).markdown(),
        "",
        "## Details",
        "",
        *_details(compared),
        "",
        "## Not compared",
        "",
        *(f"- {name}: {_reason(task)}" for name, task in skipped.items()),
    ]
    return "\n".join(lines)


def _reason(task: dict) -> str:
    return task["reason"] or "; ".join({result["reason"]: "" for _, _, result in results_of(task)})


def _row(name: str, task: dict) -> tuple[str, ...]:
    robots = ", ".join(f"{robot} ({len(modes)})" for robot, modes in task["robots"].items())
    results = [result for _, _, result in results_of(task)]
    looked, touching = (sum(result.get(key, 0) for result in results) for key in ("looked", "touching"))
    steps, pictures = (sum(result.get(key, 0) for result in results) for key in ("row_steps", "pictures"))
    touch = f"{touching / looked:.0%}" if looked else "-"
    return name, robots, headline(task), f"{steps:,}", str(pictures), touch


def _details(tasks: Mapping[str, dict]) -> Iterator[str]:
    """Yields a line per reason, with all that it holds for."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for name, task in tasks.items():
        for robot, mode, result in results_of(task):
            if result["reason"]:
                places.setdefault((name, result["verdict"], result["reason"]), []).append(f"{robot}/{mode}")
            if "short_check" in result and bool(result["short_check"]) != (result["verdict"] == "fallback"):
                key = (name, "the short check disagrees", result["short_check"] or "equal")
                places.setdefault(key, []).append(f"{robot}/{mode}")
    for (name, verdict, reason), where in places.items():
        listed = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        yield f"- {name} ({listed}): {verdict}: {reason}"
