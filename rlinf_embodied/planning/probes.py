"""Selects the runs that measure a workflow (probes), and turns their measurements into a profile.

A probe has `few` or twice as many blocks on each of its devices, however large the workload is.  It measures every
stage at one cell (items per device and call, devices).  Cells without a measurement are filled in two steps:

1. Along the items: piecewise linear, with the last slope beyond the last cell, for the number of devices with most
   cells (or all numbers of devices together if none has two cells).  A single cell is scaled in proportion to the
   items (bytes: constant).
2. Along the devices: the same curve times the median ratio of the cells that both numbers of devices have (bytes: the
   largest of any number of devices).

A shortened rollout represents a whole one: calls inside a loop count per chunk-step, resets are counted as often as
episodes end, and the memory of data that waits for later stages is scaled up.  The time of those stages is extrapolated
linearly from a very short rollout and a longer one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_embodied.cluster.hardware import WAITING, Cluster
from rlinf_embodied.planning.plan import Devices, Plan, collocated, placed, sorted_pairs
from rlinf_embodied.planning.profile import Floats, Profile, StageProfile, WeightProfile, Workload
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Workflow

Cell = tuple[int, int]  # items per device and call, devices
Cells = Mapping[Cell, float]
_MOST_BLOCKS = 4  # per device in any probe


# ----------------------------------------------------------------------------------------------------------- the probes
@dataclass(frozen=True, slots=True)
class Probe:
    """A plan that is run to be measured; `kind` is set if its device is of another kind than the first group's."""

    name: str
    workflow: Workflow
    plan: Plan
    cluster: Cluster
    kind: str = ""

    def cell(self, stage: str) -> Cell:
        """Returns the items that the busiest device of a stage gets per call, and the number of its devices."""
        devices = len(set(self.plan.owners(stage, self.workflow)))
        owned = -(-self.workflow.num_blocks // devices)
        return -(-owned // self.plan.shards(stage, self.workflow)) * self.workflow.items_per_block, devices

    @property
    def most_blocks(self) -> int:
        return max(-(-self.workflow.num_blocks // self.cell(stage)[1]) for stage in self.workflow.stages)


def probes(workflow: Workflow, cluster: Cluster) -> list[Probe]:
    """Returns the runs that measure a workflow for a cluster."""
    num, groups = min(cluster.num_computing, workflow.num_blocks), cluster.node_groups()
    few = max(1, min(-(-workflow.num_blocks // num), _MOST_BLOCKS) // 2)  # per device; at most twice as many
    batch = max(spec.blocks_per_batch for spec in workflow.stages.values())
    few = max(few, batch) if few % batch and 2 * batch <= workflow.num_blocks else few  # whole batches
    twice, cores = min(2 * few, workflow.num_blocks), cluster.cores_beside if workflow.of_cores() else ()
    every = workflow if twice * num >= workflow.num_blocks else with_blocks(workflow, twice * num)
    single, one_core, probes = with_blocks(workflow, twice), cores[:1], list[Probe]()

    def add(name: str, work: Workflow, devices: int, on: Devices = cores) -> None:
        probes.append(Probe(name, work, collocated(work, devices, cores=on), cluster))

    add(f"collocated on {num}", every, num)  # every device at work
    # each loop on two devices, the other stages on the first one: this measures the bytes of edges between workers
    if workflow.loops and (cluster.num_computing > 1 or cores):
        most = min(max(loop.shards) for loop in workflow.loops.values())
        plan = disaggregated(single, min(most, twice // few), one_core, cluster.num_computing)
        probes.append(Probe("disaggregated", single, plan, cluster))
    else:
        if few * num < every.num_blocks:
            add(f"few on {num}", with_blocks(workflow, few * num), num)
        if num > 1 or len(cores) > 1:
            add("collocated on 1", single, 1, one_core)
    # Plans may call stages for single blocks, as chunks of a stream or as shards, and a call is never priced lower than
    # the smallest one that was measured.
    streams = not workflow.loops and not all(edge.whole for edge in workflow.edges)
    waits = any(spec.waits for spec in workflow.stages.values())
    if few > 1 and (streams or waits or len({group.speed for group in groups}) > 1):
        add("one block", with_blocks(workflow, 1), 1, one_core)
    in_node = groups[0].devices_per_node
    if 1 < in_node < num:
        add("collocated on a node", with_blocks(workflow, min(workflow.num_blocks, twice * in_node)), in_node)
    kinds = {
        group.kind: devices[0]
        for group, devices in reversed([*zip(groups, cluster.group_devices(), strict=True)])
        if group.beside is None and group.kind != groups[0].kind
    }
    for kind, device in reversed(kinds.items()):
        places = dict.fromkeys(workflow.stages, (device,))
        places |= dict.fromkeys(workflow.of_cores(), one_core) if cores else {}
        probes.append(Probe(f"collocated on 1 {kind}", single, placed(single, places, "collocated"), cluster, kind))
    return probes


def disaggregated(workflow: Workflow, shards: int, cores: Devices = (), num_devices: int = 2) -> Plan:
    """Returns the plan with each loop's answerer on device 1 and everything else on device 0.

    If an answerer's workers have several devices, it is on the first ones, and everything else on the device after
    them, or on the last one.
    With `cores`, the stages that run on cores only are on the first of them, and device 0 has all the others.
    """
    each = max((workflow.stages[loop.answerer].devices_per_worker for loop in workflow.loops.values()), default=1)
    several = each > 1
    rest = min(each, num_devices - 1) if several and not cores else 0
    places: dict[str, Devices] = dict.fromkeys(workflow.stages, (rest,))
    if cores:
        places |= dict.fromkeys(workflow.of_cores(), cores[:1])
    else:
        places |= {loop.answerer: (0,) if several else (1,) for loop in workflow.loops.values()}
    return placed(workflow, places, "disaggregated", shards)


def switching(probe: Probe) -> Probe:
    """Returns the probe with one stage or loop in memory at a time, for devices too small to hold all of them."""
    items = [item.stages for item in probe.plan.items]
    pairs = [pair for a, b in itertools.combinations(items, 2) for pair in itertools.product(a, b)]
    plan = replace(probe.plan, exclusive=sorted_pairs(pairs))
    return replace(probe, name=f"{probe.name}, switching", plan=plan)


def with_blocks(workflow: Workflow, num_blocks: int) -> Workflow:
    """Returns the workflow with fewer blocks, without streaming and with one round."""
    edges = tuple(replace(edge, whole=True) for edge in workflow.edges)
    stages = {
        n: replace(s, blocks_per_batch=math.gcd(s.blocks_per_batch, num_blocks)) for n, s in workflow.stages.items()
    }
    return replace(workflow, num_blocks=num_blocks, stages=stages, edges=edges).with_rounds(1.0, most=1)


def shortened(workflow: Workflow, chunk_steps: int) -> Workflow:
    """Returns the workflow with loops of at most `chunk_steps`.

    Shortened loops run for one round, since short episodes would not satisfy a repeat's criterion.
    """
    if all(loop.chunk_steps <= chunk_steps for loop in workflow.loops.values()):
        return workflow
    loops = {n: replace(o, chunk_steps=min(chunk_steps, o.chunk_steps)) for n, o in workflow.loops.items()}
    return replace(workflow, loops=loops).with_rounds(1.0, most=1)


# --------------------------------------------------------------------------------------------------------- measurements
@dataclass(slots=True)
class Shown:
    """Measurements of one stage by cell, and the costs of offloading and onloading it."""

    seconds: dict[Cell, list[float]] = field(default_factory=dict)  # of each repetition
    resident: dict[Cell, float] = field(default_factory=dict)
    sharing: dict[Cell, float] = field(default_factory=dict)  # resident bytes where weights' ends share a worker
    working: dict[Cell, float] = field(default_factory=dict)
    other_kinds: dict[str, dict[Cell, list[float]]] = field(default_factory=dict)  # seconds
    finishes: list[Mapping[int, float]] = field(default_factory=list)  # of calls with a long tail: seconds by block
    offloaded_bytes: float | None = None  # None: it cannot be offloaded
    offload_s: float = 0.0
    onload_s: float = 0.0
    cores: float = 1.0


@dataclass(slots=True)
class Measurements:
    """Measurements of all probes of a workflow."""

    workflow: Workflow  # the complete one
    stages: dict[str, Shown] = field(default_factory=dict)
    edge_bytes_per_item: dict[tuple[str, str], float] = field(default_factory=dict)
    weights: dict[tuple[str, str], WeightProfile] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)  # rounds of the repeat, by measured iteration
    chunk_steps: int = 1  # of a loop that were run
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = {name: Shown() for name in self.workflow.stages}

    def add(self, probe: Probe, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of each stage in one iteration of a probe."""
        for stage, value in seconds.items():
            measured = self.stages[stage]
            cells = measured.other_kinds.setdefault(probe.kind, {}) if probe.kind else measured.seconds
            cells.setdefault(probe.cell(stage), []).append(value)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a probe: its workflow, with shortened loops, and its recorded times."""

    run: Workflow
    spans: Sequence[Span]
    seconds: float
    rounds: Mapping[str, int] = field(default_factory=dict)  # of each stage that is repeated
    finishes: Mapping[str, list[Mapping[int, float]]] = field(default_factory=dict)  # of calls with long tails


def sample(probe: Probe, whole: Workflow, one: Iteration, short: Iteration | None = None) -> dict[str, float]:
    """Returns the seconds of each stage in the whole workflow: per call, or per chunk-step of one shard inside a loop.

    For each loop, and each stage outside loops, the slowest worker counts, since the others wait for it.  `short` is an
    iteration with even shorter loops, to extrapolate the stages downstream of them; without it their times are scaled
    in proportion.
    """
    run, seconds_of = one.run, dict[str, float]()
    for stage in run.stages:
        loop = run.loop_of(stage)
        if loop is None:
            seconds_of[stage] = _behind_loops(stage, whole, one, short)
            continue
        most, episode = whole.loops[loop.name].chunk_steps, loop.typical_steps
        longer, opens = most / loop.chunk_steps, 1.0  # per rollout
        if episode:  # beyond the resets inside the steps that were run
            opens = max(1.0, most / episode - loop.chunk_steps // episode * longer)
        sides = loop.sides if probe.plan.is_fused(loop, probe.workflow) else (stage,)
        seconds = _critical(one.spans, sides, {"open": opens, "step": longer, "close": 1.0})
        calls = most * probe.plan.shards(stage, probe.workflow) * one.rounds.get(loop.opener, 1)
        seconds_of[stage] = seconds[stage] / calls
    return seconds_of


def _behind_loops(stage: str, whole: Workflow, one: Iteration, short: Iteration | None) -> float:
    """Returns the seconds of a call downstream of whole loops.

    Between a third and all of the seconds are taken to grow with the loops' length.
    """
    seconds, *shorter = (
        _critical(each.spans, [stage], {"run": 1.0 / each.rounds.get(stage, 1)})[stage]
        for each in (one, short)
        if each is not None
    )
    loops = {n: loop for n, loop in one.run.loops.items() if not one.run.upstream(stage).isdisjoint(loop.sides)}
    longer = max((whole.loops[n].chunk_steps / loop.chunk_steps for n, loop in loops.items()), default=1.0)
    if short is None or longer == 1.0:
        return seconds * longer
    part = min(short.run.loops[n].chunk_steps / loop.chunk_steps for n, loop in loops.items())  # of a rollout of `one`
    slope = (seconds - shorter[0]) / (1.0 - part) if part < 1.0 else seconds
    return seconds + (longer - 1.0) * min(max(slope, seconds / 3), seconds)


def _critical(spans: Iterable[Span], stages: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the weighted seconds of each stage's methods on the worker whose sum is largest."""
    by_worker: dict[int, dict[str, float]] = {}
    for span in spans:
        weight = weights.get(span.name.removeprefix(f"{span.stage}."))
        if span.stage in stages and weight is not None:
            seconds = by_worker.setdefault(span.worker, dict.fromkeys(stages, 0.0))
            seconds[span.stage] += weight * span.duration_s
    return max(by_worker.values(), key=lambda seconds: sum(seconds.values()))


# ---------------------------------------------------------------------------------------------------------- the profile
def profile_of(name: str, cluster: Cluster, measured: Measurements, fingerprint: Mapping[str, str]) -> Profile:
    """Returns the profile made from measurements."""
    work = measured.workflow
    loop = next(iter(work.loops.values()), None)
    expected = work.repeat.expected_rounds if work.repeat else 1.0
    return Profile(
        name=name,
        device_kind=cluster.node_groups()[0].kind,
        stages={stage: _stage(stage, measured) for stage in work.stages},
        edge_bytes_per_item=measured.edge_bytes_per_item,
        weights=measured.weights,
        fingerprint=fingerprint,
        workload=Workload(
            workflow=work.of_workload or work.name,
            num_items=work.num_blocks * work.items_per_block,
            items_per_block=work.items_per_block,
            chunk_steps=loop.chunk_steps if loop else 1,
            expected_rounds=statistics.mean(measured.rounds) if measured.rounds else expected,
            max_rounds=work.repeat.max_rounds if work.repeat else 1,
            blocks_per_batch=max(spec.blocks_per_batch for spec in work.stages.values()),
            devices_per_worker=max(spec.devices_per_worker for spec in work.stages.values()),
        ),
        sources=measured.sources,
    )


def _stage(stage: str, measured: Measurements) -> StageProfile:
    of_stage, work = measured.stages[stage], measured.workflow
    # a median, which ignores disturbed repetitions, is too short where few iterations with long tails take most time
    typical = statistics.mean if work.stages[stage].at_once else statistics.median
    seconds = {cell: typical(values) for cell, values in of_stage.seconds.items()}
    items, devices = grid([*seconds, *of_stage.resident, *of_stage.sharing])
    resident, shared = _resident(stage, measured)
    loop, spec = next(iter(work.loops.values()), None), work.stages[stage]
    missing = 1.0 - measured.chunk_steps / loop.chunk_steps if loop else 0.0  # fraction of a rollout's data
    ends = [(edge.source, edge.target) for edge in work.edges if stage in (edge.source, edge.target)]
    waiting = missing * sum(measured.edge_bytes_per_item.get(pair, 0.0) for pair in dict.fromkeys(ends))
    result = StageProfile(
        name=stage,
        in_loop=work.loop_of(stage) is not None,
        items_per_device=np.array(items, float),
        devices=np.array(devices, float),
        seconds=fill(seconds, items, devices),
        resident_bytes=fill_bytes(resident, items, devices),
        shared_bytes=shared,
        working_bytes=fill_bytes(of_stage.working, items, devices) + waiting * np.array(items)[:, None],
        stays=of_stage.offloaded_bytes is None,
        offloaded_bytes=(
            max(resident.values(), default=0.0) if of_stage.offloaded_bytes is None else of_stage.offloaded_bytes
        ),
        offload_s=of_stage.offload_s,
        onload_s=of_stage.onload_s,
        cores_per_device=of_stage.cores,
        finish_quantiles=finish_quantiles(of_stage.finishes) if of_stage.finishes else (),
    )
    factors = dict[str, float]()
    for kind, cells in of_stage.other_kinds.items():
        ratios = [statistics.median(s) / max(result.call_s(*cell), 1e-9) for cell, s in cells.items()]
        factors[kind] = statistics.median(ratios)
    return replace(result, kind_factors=factors | dict.fromkeys((*spec.kinds, *[WAITING] * spec.waits), 1.0))


def _resident(stage: str, measured: Measurements) -> tuple[dict[Cell, float], float]:
    """Returns a stage's resident bytes in a separate worker, and those shared with the other end of its weight edge.

    If it was measured with and without the other end in its worker, the difference is shared; otherwise the weights'
    bytes are.
    """
    of_stage = measured.stages[stage]
    differences = [
        of_stage.resident[cell] - held for cell, held in of_stage.sharing.items() if cell in of_stage.resident
    ]
    sent = max((weights.bytes for ends, weights in measured.weights.items() if ends[0] == stage), default=0.0)
    shared = max(0.0, statistics.median(differences)) if differences else sent if of_stage.sharing else 0.0
    return {cell: held + shared for cell, held in of_stage.sharing.items()} | of_stage.resident, shared


def finish_quantiles(finishes: Sequence[Mapping[int, float]]) -> tuple[tuple[float, float], ...]:
    """Returns (share of the blocks, share of the call's time after which they are finished), ascending.

    `finishes` has the seconds by block of each call; only calls with the largest number of blocks count.
    """
    most = max(map(len, finishes))
    rows = [sorted(seconds.values()) for seconds in finishes if len(seconds) == most]
    return tuple(((k + 1) / most, statistics.mean(row[k] / row[-1] for row in rows)) for k in range(most))


def grid(cells: Iterable[Cell]) -> tuple[list[int], list[int]]:
    """Returns the axes of the table: all items (at least two numbers of them) and devices that were measured."""
    items = sorted({i for i, _ in cells})
    return items if len(items) > 1 else [items[0], 2 * items[0]], sorted({d for _, d in cells})


def fill(cells: Cells, items: Sequence[int], devices: Sequence[int]) -> Floats:
    """Returns the table of seconds [items, devices], measured cells as they are and the others by the rules above."""
    columns = {d: {i: value for (i, e), value in cells.items() if e == d} for d in devices}
    base = max(columns.values(), key=len)
    if len(base) == 1:
        base = {item: value for column in reversed(columns.values()) for item, value in column.items()}
    curve = np.array([_along(base, i) for i in items])
    table = np.zeros((len(items), len(devices)))
    for number, known in enumerate(columns.values()):
        ratios = [value / _along(base, i) for i, value in known.items() if _along(base, i) > 0]
        table[:, number] = [
            known.get(i, at * statistics.median(ratios or [1.0])) for i, at in zip(items, curve, strict=True)
        ]
    return table


def fill_bytes(cells: Cells, items: Sequence[int], devices: Sequence[int]) -> Floats:
    """Returns the same table of bytes; zeros where none were measured."""
    largest: dict[int, float] = {}
    for (i, _), value in cells.items():
        largest[i] = max(largest.get(i, 0.0), value)
    curve = {i: _along(largest, i, constant=True) for i in items}
    return np.array([[cells.get((i, d), curve[i]) for d in devices] for i in items])


def _along(points: Mapping[int, float], item: int, constant: bool = False) -> float:
    """Returns the value at `item`: linear between points and by the nearest slope beyond them, never falling."""
    known = sorted(points)
    if item in points or not points:
        return points.get(item, 0.0)
    if len(known) == 1:
        return points[known[0]] * (1.0 if constant else item / known[0])
    right = min(max(sum(k < item for k in known), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    value = points[low] + (points[high] - points[low]) * (item - low) / (high - low)
    return max(value, points[low] * item / low) if item < low else max(value, points[high]) if item > high else value
