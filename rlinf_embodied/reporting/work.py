"""Sections on where the time went: the plan with a Gantt chart, seconds per stage, idle devices."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from rlinf_embodied.reporting.activity import Activity, idle_shares, measured, predicted
from rlinf_embodied.reporting.drawings import Bar, Chart, Line, colour_of, line_chart, time_bars
from rlinf_embodied.reporting.pieces import folded, missing, table
from rlinf_embodied.reporting.runs import Run

_DRAWN_ROWS = 24  # a chart with more rows cannot be read


def plan(run: Run) -> str:
    """The plan, what it was predicted to take and what it took, and one iteration of both, on the same axis of time."""
    if not run.plan:
        return missing("plan.json: no plan was chosen yet")
    text = f"<p>Plan <b>{escape(str(run.plan.get('name')))}</b> on {run.plan.get('num_devices')} devices.</p>"
    drawn = gantt([predicted(run), measured(run)])
    return text + drawn + _predictions(run) + _ranking(run)


def gantt(activities: Sequence[Activity | str]) -> str:
    """Returns charts below each other that share colours and the axis of time; a text says why one is missing."""
    known = [activity for activity in activities if isinstance(activity, Activity)]
    colours = colour_of(list(dict.fromkeys(span.stage for activity in known for span in activity.spans)))
    longest = max((activity.length_s for activity in known), default=0.0)
    parts = []
    for activity in activities:
        if isinstance(activity, str):
            parts.append(missing(activity))
            continue
        places = sorted(
            {(span.worker, span.stage) for span in activity.spans}, key=lambda p: (p[0], [*colours].index(p[1]))
        )
        rows = {
            f"device {worker} {stage}": [
                Bar(s.start_s, s.end_s, colours[stage], f"{s.name}: {s.duration_s:.3f} s from {s.start_s:.2f} s")
                for s in activity.spans
                if (s.worker, s.stage) == (worker, stage)
            ]
            for worker, stage in places[:_DRAWN_ROWS]
        }
        left_out = f", {len(places) - _DRAWN_ROWS} rows not drawn" if len(places) > _DRAWN_ROWS else ""
        parts.append(f"<h4>{escape(activity.what)}: {activity.length_s:.2f} s{left_out}</h4>{time_bars(rows, longest)}")
    return "".join(parts)


def _predictions(run: Run) -> str:
    rows = []
    for period in run.plan_report.get("periods", []):
        first, number = period["first_iteration"] + 1, period["num_iterations"]
        for name, seconds in period["measured_s"].items():
            told, error = period["predicted_s"].get(name), period["error"].get(name)
            said = [f"{told:.3g}" if told is not None else "-", f"{seconds:.3g}"]
            off = f"{error:+.1%}" if error is not None else "-"
            rows.append([f"{number} from {first} on" if name == "iteration" else "", name, *said, off])
    if not rows:
        return missing("plan_report.json has no measured iterations (it is written when a run ends)")
    return table(["iterations", "stage", "predicted s", "measured s (median)", "error"], rows)


def _ranking(run: Run) -> str:
    ranked = run.plan.get("ranked") or []
    if not ranked:
        return ""
    return folded(
        f"{len(ranked)} ranked plans", table(list(ranked[0]), [[str(v) for v in row.values()] for row in ranked])
    )


def seconds(run: Run) -> str:
    """Seconds of each stage, iteration by iteration, their medians, and where the time before the first step went."""
    names = [name for name in dict.fromkeys(name for row in run.metrics for name in row) if name.startswith("time/")]
    stages = [name for name in names if name != "time/total_s"]
    if not stages:
        return missing("no iteration was finished")
    colours = colour_of(stages)
    label = lambda name: name.removeprefix("time/").removesuffix("_s")  # noqa: E731
    lines = [Line(label(name), run.column(name), colours[name]) for name in stages]
    chart = line_chart(Chart(run.unit, "seconds per iteration", None, 760, 240, lines=lines))
    whole = statistics.median([y for _, y in run.column("time/iteration_s")] or [0.0])
    rows = []
    for name in stages:
        middle = statistics.median(y for _, y in run.column(name))
        rows.append([label(name), f"{middle:.3g}", f"{middle / whole:.0%}" if whole else "-"])
    found = chart + table(["stage (its busiest worker)", "median s", "of an iteration"], rows)
    startup = run.summary.get("startup_s")
    if not startup:
        return found + missing("seconds of the start-up (they are written at the end of a run)")
    parts = table(["start-up", "s"], [[name, f"{value:.2f}"] for name, value in startup.items()])
    return found + folded("the start-up", parts)


def idle(run: Run) -> str:
    """The share of the time in which each device does nothing, predicted and measured."""
    told, seen = predicted(run), idle_shares(run)
    expected = told.idle if isinstance(told, Activity) else {}
    if not seen and not expected:
        return missing("nothing was traced (trace.json is written at the end of a run), and nothing was predicted")
    names = {span.worker: span.device for span in run.spans}
    rows = []
    for worker in sorted({*seen, *expected}):
        shares = [f"{found[worker]:.1%}" if worker in found else "-" for found in (expected, seen)]
        rows.append([str(worker), names.get(worker, "-"), *shares])
    return table(["device", "worker", "idle, predicted", "idle, measured over all traced iterations"], rows)
