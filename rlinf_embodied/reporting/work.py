"""Sections of a run's page on where the time went: plan, predicted and measured iteration, seconds of the stages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import stored_variant
from rlinf_embodied.errors import RlinfError
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured, linked, load_profile, workflow_for
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.reporting.elements import drawn, missing, table
from rlinf_embodied.telemetry.plots import COLOURS, Line, gantt, line_chart
from rlinf_embodied.telemetry.run_reader import Run
from rlinf_embodied.telemetry.trace import Span


def plan(run: Run) -> str:
    """The plan, what it was predicted to take and what it took, and one iteration of both, on the same axis of time."""
    if not run.plan:
        return missing("plan.json: no plan was chosen yet")
    text = f"<p>Plan <b>{escape(str(run.plan.get('name')))}</b> on {run.plan.get('num_devices')} devices.</p>"
    found = [predicted(run), measured(run)]
    known = {f"{one.what}: {one.length_s:.2f} s": one.spans for one in found if isinstance(one, Activity)}
    text += "".join(missing(why) for why in found if isinstance(why, str))
    return text + (drawn(gantt(known), "what ran when") if known else "") + _predictions(run)


def _predictions(run: Run) -> str:
    rows = []
    for period in run.plan_report.get("periods", []):
        first, number = period["first_iteration"] + 1, period["num_iterations"]
        for name, seconds in period["measured_s"].items():
            expected, error = period["predicted_s"].get(name), period["error"].get(name)
            pair = [f"{expected:.3g}" if expected is not None else "-", f"{seconds:.3g}"]
            off = f"{error:+.1%}" if error is not None else "-"
            rows.append([f"{number} from {first} on" if name == "iteration" else "", name, *pair, off])
    if not rows:
        return missing("measured iterations in plan_report.json (it is written when a run ends)")
    return table(["iterations", "stage", "predicted s", "measured s (median)", "error"], rows)


def seconds(run: Run) -> str:
    """Seconds of each stage, iteration by iteration and their medians, and the share in which each device is idle."""
    stages = [name for name in run.names if name.startswith("time/") and name != "time/total_s"]
    if not stages:
        return missing("no iteration was finished")
    label = lambda name: name.removeprefix("time/").removesuffix("_s")  # noqa: E731
    lines = [Line(label(name), run.column(name), COLOURS[k % len(COLOURS)]) for k, name in enumerate(stages)]
    chart = drawn(line_chart(lines, run.unit, "seconds per iteration", size=(7.6, 2.6)), "seconds per iteration")
    whole = statistics.median([y for _, y in run.column("time/iteration_s")] or [0.0])
    rows = []
    for name in stages:
        middle = statistics.median(y for _, y in run.column(name))
        rows.append([label(name), f"{middle:.3g}", f"{middle / whole:.0%}" if whole else "-"])
    text = chart + table(["stage (its busiest worker)", "median s", "of an iteration"], rows)
    devices = {span.worker: span.device for span in run.spans}
    idle = [[str(worker), devices[worker], f"{share:.1%}"] for worker, share in idle_shares(run).items()]
    return text + (table(["worker", "device", "idle"], idle) if idle else missing("trace.json: idle devices"))


# ----------------------------------------------------------------------------------------------- predicted and measured
@dataclass(frozen=True, slots=True)
class Activity:
    """One iteration, from 0 s on."""

    what: str  # "predicted from profile.json", or "measured, iteration 7"
    spans: Sequence[Span]
    length_s: float


def predicted(run: Run) -> Activity | str:
    """Returns the simulated iteration of the plan that ran, or why there is none."""
    path = run.folder / "profile.json"
    if not path.is_file() or not run.manifest:
        return "profile.json or manifest.json, so nothing is predicted (one device or one process leaves one plan)"
    found = run.manifest["hardware"]
    sizes = (found["devices"], found["cores"], found["memory_bytes"], found["description"])
    cluster = Cluster(found["cluster"], found["kind"], *sizes)
    try:
        profile = load_profile(path)
        workflow = as_measured(workflow_for(profile), profile)
        plan = resolve(str(run.plan.get("name")), [stored_variant(run.plan)], cluster.num_devices, workflow)
        result = simulate(plan, Pricer(workflow, profile, linked(cluster, profile)), traced=True)
    except RlinfError as error:
        return f"nothing can be predicted: {error}"
    return Activity("predicted from profile.json", result.spans, result.iteration_s)


def measured(run: Run) -> Activity | str:
    """Returns the iteration of median length in the trace except the first, or the reason why none is available."""
    by_iteration = iterations(run.spans)
    if not by_iteration:
        return "trace.json is not there: it is written at the end of a run"
    lengths = {number: _length_s(spans) for number, spans in by_iteration.items()}
    numbers = [number for number in lengths if number != min(lengths)] or list(lengths)
    middle = sorted(numbers, key=lambda number: lengths[number])[len(numbers) // 2]
    start = min(span.start_s for span in by_iteration[middle])
    spans = [replace(s, start_s=s.start_s - start, end_s=s.end_s - start) for s in by_iteration[middle]]
    return Activity(f"measured, iteration {middle + 1}", spans, lengths[middle])


def iterations(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Returns the spans of each iteration, which count from 0."""
    found: dict[int, list[Span]] = {}
    for span in spans:
        number = span.args.get("iteration")
        if isinstance(number, int):
            found.setdefault(number, []).append(span)
    return found


def idle_shares(run: Run) -> dict[int, float]:
    """Returns the share of all traced iterations in which a worker did nothing."""
    by_iteration = iterations(run.spans)
    seconds = {int(row["iteration"] or 0) - 1: row.get("time/iteration_s") for row in run.metrics}
    whole = sum(seconds.get(number) or _length_s(spans) for number, spans in by_iteration.items())
    busy: dict[int, float] = {}
    for spans in by_iteration.values():
        for worker in {span.worker for span in spans}:
            mine = [span for span in spans if span.worker == worker]
            busy[worker] = busy.get(worker, 0.0) + union_s(mine)
    return {worker: max(0.0, 1 - busy[worker] / whole) for worker in sorted(busy)} if whole else {}


def union_s(spans: Iterable[Span]) -> float:
    """Returns the seconds in which at least one of the spans is active."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _length_s(spans: Sequence[Span]) -> float:
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)
