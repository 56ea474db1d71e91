"""From what was measured to a profile: seconds by (items per device, devices), with every cell of the grid filled.

A run shows each stage at one point of the grid.  Cells between and beyond are filled by two rules, named in the
profile's `sources`: on one device along the items (linear between points, in proportion where there is only one), on
several by the factor by which these were slower than one where both are known.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.cluster.hardware import WAITING
from rlinf_embodied.planning.probes import Probe
from rlinf_embodied.planning.profile import FORMAT
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Workflow

Cell = tuple[int, int]  # items per device and call, devices


@dataclass(frozen=True, slots=True)
class Sample:
    """What one repetition showed of a stage: seconds per call, or per chunk-step of one shard inside a loop."""

    stage: str
    items: int
    devices: int
    seconds: float


@dataclass(slots=True)
class Memory:
    """Bytes of a stage, by cell, and what switching it costs."""

    resident: dict[Cell, float] = field(default_factory=dict)
    working: dict[Cell, float] = field(default_factory=dict)
    offloaded_bytes: float | None = None  # None: it cannot be offloaded
    offload_s: float = 0.0
    onload_s: float = 0.0
    cores: float = 1.0


@dataclass(slots=True)
class Measurements:
    """Everything that the probes of a workflow showed."""

    samples: list[Sample] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    edge_bytes_per_item: dict[tuple[str, str], float] = field(default_factory=dict)
    weights: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)  # of what is repeated, by repetition
    finishes: dict[str, list[Mapping[int, float]]] = field(default_factory=dict)  # of stages with long tails, by call
    chunk_steps: int = 1  # that were run, of a loop
    links: dict[str, float] = field(default_factory=dict)
    disturbed: float = 0.0  # largest share of a worker's calls in which it waited for a core
    sources: dict[str, str] = field(default_factory=dict)


def cell_of(probe: Probe, stage: str) -> Cell:
    """Returns the point of the grid at which a probe shows a stage."""
    return probe.blocks_per_call(stage) * probe.workflow.items_per_block, probe.devices(stage)


def samples(
    probe: Probe, run: Workflow, whole: Workflow, spans: Sequence[Span], rounds: Mapping[str, int]
) -> list[Sample]:
    """Returns what one iteration of a probe showed of each stage.

    Of each loop (and of each stage outside) the worker that took longest counts: the others wait for it.

    Args:
        probe: what ran.
        run: the workflow as it ran, its loops perhaps shortened.
        whole: the workflow with all chunk-steps; a stage behind a loop has so much more to do.
        spans: of the iteration.
        rounds: how often each stage that is repeated ran.
    """
    speeds = [probe.cluster.place_of(device).group.speed for device in range(probe.cluster.num_devices)]
    stretch = {name: whole.loops[name].chunk_steps / loop.chunk_steps for name, loop in run.loops.items()}
    found = []
    for stage in run.stages:
        loop = run.loop_of(stage)
        if loop is None:
            factor = max([stretch[name] for name in _upstream_loops(run, stage)], default=1.0)
            paces = _in_step(stage, spans, speeds) if run.stages[stage].collective else speeds
            (seconds,) = _critical(spans, {stage: {"run": factor / rounds.get(stage, 1)}}, paces)
            found.append(Sample(stage, *cell_of(probe, stage), seconds))
            continue
        shared = probe.plan.shares_workers(loop.name, probe.workflow.num_blocks)
        sides = loop.sides if shared else (stage,)
        # a shortened rollout is opened and closed as often as a whole one
        weights = {side: {"open": 1.0, "step": stretch[loop.name], "close": 1.0} for side in sides}
        seconds = dict(zip(sides, _critical(spans, weights, speeds), strict=True))[stage]
        calls = whole.loops[loop.name].chunk_steps * probe.shards(stage) * rounds.get(loop.opener, 1)
        found.append(Sample(stage, *cell_of(probe, stage), seconds / calls))
    return found


def _critical(
    spans: Iterable[Span], methods: Mapping[str, Mapping[str, float]], speeds: Sequence[float]
) -> list[float]:
    """Returns the seconds of each stage, its methods weighted, on the worker on which they took longest together.

    They are those of a device of speed 1: a slow one, as the config has it, is expected to take longer.
    """
    stages = tuple(methods)
    names = {f"{s}.{method}": (s, weight) for s in stages for method, weight in methods[s].items()}
    by_worker: dict[int, dict[str, float]] = {}
    for span in spans:
        if span.name in names:
            seconds = by_worker.setdefault(span.worker, dict.fromkeys(stages, 0.0))
            stage, weight = names[span.name]
            seconds[stage] += weight * span.duration_s * speeds[span.worker]
    busiest = max(by_worker.values(), key=lambda seconds: sum(seconds.values()))
    return [busiest[stage] for stage in stages]


def _in_step(stage: str, spans: Iterable[Span], speeds: Sequence[float]) -> list[float]:
    """Returns the speeds at which the workers of a collective stage go: they wait for the slowest of them."""
    slowest = min(speeds[span.worker] for span in spans if span.stage == stage)
    return [slowest] * len(speeds)


def _upstream_loops(workflow: Workflow, stage: str) -> set[str]:
    """Returns the loops that a stage's data comes from, over any number of edges."""
    found: set[str] = set()
    for source in workflow.sources(stage):
        loop = workflow.loop_of(source)
        found |= {loop.name} if loop else _upstream_loops(workflow, source)
    return found


# ---------------------------------------------------------------------------------------------------------- the profile
def profile_dict(
    name: str, workflow: Workflow, kind: str, measured: Measurements, fingerprint: Mapping[str, str]
) -> dict[str, object]:
    """Returns a profile in the form of a profile file (see planning/profile_file.py)."""
    stages = {stage: _stage_dict(workflow, stage, measured) for stage in workflow.stages}
    loops = list(workflow.loops.values())
    work: dict[str, object] = {
        "workflow": workflow.of_workload or workflow.name,
        "num_items": workflow.num_blocks * workflow.items_per_block,
        "items_per_block": workflow.items_per_block,
    }
    rounds = statistics.mean(measured.rounds) if measured.rounds else 1.0
    if loops:
        work |= {"chunk_steps": loops[0].chunk_steps, "expected_rounds": rounds, "max_rounds": loops[0].max_rounds}
    elif workflow.repeat is not None:
        work |= {"expected_rounds": rounds, "max_rounds": workflow.repeat.max_rounds}
    blocks_per_batch = max(spec.blocks_per_batch for spec in workflow.stages.values())
    work |= {"blocks_per_batch": blocks_per_batch} if blocks_per_batch > 1 else {}
    return {
        "format": FORMAT,
        "name": name,
        "device_kind": kind,
        "fingerprint": dict(fingerprint),
        "workload": work,
        "sources": measured.sources,
        "stages": stages,
        "edge_bytes_per_item": {f"{a}->{b}": n for (a, b), n in measured.edge_bytes_per_item.items()},
        "weights": {f"{a}->{b}": numbers for (a, b), numbers in measured.weights.items()},
        "disturbed": measured.disturbed,
        **({"links": measured.links} if measured.links else {}),
    }


def _stage_dict(workflow: Workflow, stage: str, measured: Measurements) -> dict[str, object]:
    mine = [sample for sample in measured.samples if sample.stage == stage]
    cells: dict[Cell, list[float]] = {}
    for sample in mine:
        cells.setdefault((sample.items, sample.devices), []).append(sample.seconds)
    medians = {cell: statistics.median(values) for cell, values in cells.items()}
    items, devices = grid(medians)
    memory = measured.memory.get(stage, Memory())
    key = "s_per_chunk_step" if workflow.loop_of(stage) else "s_per_call"
    entry: dict[str, object] = {
        "items_per_device": items,
        "devices": devices,
        key: fill(medians, items, devices),
        "resident_bytes": _largest(memory.resident, items, devices),
        "working_bytes": _largest(memory.working, items, devices),
        "offload_s": memory.offload_s,
        "onload_s": memory.onload_s,
        "cores_per_device": memory.cores,
        "spread_s": max((max(v) - min(v)) for v in cells.values()),
    }
    if stage in measured.finishes:
        entry["finish_quantiles"] = finish_quantiles(measured.finishes[stage])
    # what cannot be offloaded stays where it is
    resident = max(memory.resident.values(), default=0.0)
    entry["offloaded_bytes"] = resident if memory.offloaded_bytes is None else memory.offloaded_bytes
    spec = workflow.stages[stage]
    if factors := dict.fromkeys((*spec.kinds, *([WAITING] if spec.waits else [])), 1.0):
        entry["kind_factors"] = factors
    return entry | ({"stays": True} if memory.offloaded_bytes is None else {})


def finish_quantiles(finishes: Sequence[Mapping[int, float]]) -> list[list[float]]:
    """Returns (share of the blocks, share of the call's time after which they are finished), ascending.

    Args:
        finishes: of each call, seconds after its start at which each block was finished; calls with most blocks count.
    """
    most = max(map(len, finishes))
    rows = [sorted(found.values()) for found in finishes if len(found) == most]
    return [[(k + 1) / most, statistics.mean(row[k] / row[-1] for row in rows)] for k in range(most)]


def grid(cells: Mapping[Cell, float]) -> tuple[list[int], list[int]]:
    """Returns the axes of the table: all items and devices at which something was measured.

    One number of items makes no slope: twice as many are added, in proportion.  One device is always there.
    """
    items = sorted({i for i, _ in cells})
    return items if len(items) > 1 else [items[0], 2 * items[0]], sorted({1, *(d for _, d in cells)})


def fill(cells: Mapping[Cell, float], items: Sequence[int], devices: Sequence[int]) -> list[list[float]]:
    """Returns the table [items, devices] with measured cells as they are and the others by the rules above."""
    alone = {i: s for (i, d), s in cells.items() if d == 1}
    if not alone:  # nothing was measured on one device: as if devices did not disturb each other
        alone = {i: s for (i, _), s in cells.items()}
    first = {i: _along(alone, i) for i in items}
    table = [[first[i]] + [0.0] * (len(devices) - 1) for i in items]
    for column, d in enumerate(devices):
        if d == 1:
            continue
        ratios = [s / first[i] for (i, e), s in cells.items() if e == d and first[i] > 0]
        factor = statistics.median(ratios) if ratios else 1.0
        for row, i in enumerate(items):
            table[row][column] = cells.get((i, d), first[i] * factor)
    return table


def _along(points: Mapping[int, float], item: int) -> float:
    """Returns the seconds at `item`: linear between points and by their nearest slope beyond, or in proportion."""
    if item in points:
        return points[item]
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]] * item / known[0]
    right = min(max(sum(1 for k in known if k < item), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    value = points[low] + (points[high] - points[low]) * (item - low) / (high - low)
    if item < low:
        return max(value, points[low] * item / low)
    return max(value, points[high]) if item > high else value


def _largest(bytes_by_cell: Mapping[Cell, float], items: Sequence[int], devices: Sequence[int]) -> list[list[float]]:
    """Returns a table of bytes: measured cells, elsewhere what the next smaller measured number of items has."""
    if not bytes_by_cell:
        return [[0.0] * len(devices) for _ in items]
    by_items: dict[int, float] = {}
    for (i, _), number in bytes_by_cell.items():
        by_items[i] = max(by_items.get(i, 0.0), number)

    def at(item: int) -> float:
        below = [i for i in by_items if i <= item]
        return by_items[max(below)] if below else min(by_items.values())

    return [[bytes_by_cell.get((i, d), at(i)) for d in devices] for i in items]
