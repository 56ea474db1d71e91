"""What each device did in one iteration: as the plan's profile predicts it, and as the trace measured it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import stored_variant
from rlinf_embodied.errors import RlinfError
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured, linked, load_profile, workflow_for
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.reporting.runs import Run
from rlinf_embodied.telemetry.trace import Span


@dataclass(frozen=True, slots=True)
class Activity:
    """One iteration, from 0 s on."""

    what: str  # "predicted", or "measured in iteration 7"
    spans: Sequence[Span]
    length_s: float
    idle: Mapping[int, float]  # share of the time in which a device does nothing, by worker


def predicted(run: Run) -> Activity | str:
    """Returns the simulated iteration of the plan that ran, or why there is none."""
    path = run.folder / "profile.json"
    if not path.is_file():
        return "nothing was predicted: the run holds no profile.json (one device or one process leaves one plan)"
    if not run.plan or not run.manifest:
        return "nothing can be predicted: plan.json or manifest.json is missing"
    hardware = run.manifest["hardware"]
    cluster = Cluster(
        hardware["cluster"],
        hardware["kind"],
        hardware["devices"],
        hardware["cores"],
        hardware["memory_bytes"],
        hardware["description"],
    )
    try:
        profile = load_profile(path)
        workflow = as_measured(workflow_for(profile), profile)
        plan = resolve(str(run.plan.get("name")), [stored_variant(run.plan)], cluster.num_devices, workflow)
        result = simulate(plan, Pricer(workflow, profile, linked(cluster, profile)), traced=True)
    except RlinfError as error:
        return f"nothing can be predicted: {error}"
    idle = {device: result.idle_share(device) for device in sorted({span.worker for span in result.spans})}
    return Activity("predicted from profile.json", result.spans, result.iteration_s, idle)


def measured(run: Run) -> Activity | str:
    """Returns the iteration of median length in the trace except the first, or the reason why none is available."""
    by_iteration = iterations(run.spans)
    if not by_iteration:
        return "trace.json is not there: it is written at the end of a run"
    lengths = {number: _length_s(spans) for number, spans in by_iteration.items()}
    numbers = [number for number in lengths if number != min(lengths)] or list(lengths)
    middle = sorted(numbers, key=lambda number: lengths[number])[len(numbers) // 2]
    start = min(span.start_s for span in by_iteration[middle])
    spans = [
        Span(s.name, s.stage, s.worker, s.device, s.start_s - start, s.end_s - start, s.args)
        for s in by_iteration[middle]
    ]
    return Activity(f"measured, iteration {middle + 1}", spans, lengths[middle], idle_shares(run))


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
