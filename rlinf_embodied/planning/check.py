"""Checks whether a plan can run a workflow: placement, order, streaming and staleness of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Item, Place, Plan, whole, with_lent
from rlinf_embodied.workflow.graph import Workflow


def check(plan: Plan, workflow: Workflow) -> None:
    """Checks a plan against the workflow that it is to run.

    Raises:
        PlanError: names the stage, loop or edge, the rule that it breaks, and what to do.
    """
    for problem in _problems(plan, workflow):
        raise PlanError(f"plan {plan.name} {problem}")
    ahead = plan.staleness
    if ahead and (why := never_ahead(workflow)):
        raise PlanError(f"plan.{plan.name}.staleness is {ahead}, but the workflow {workflow.name} {why}: use 0")


def never_ahead(workflow: Workflow) -> str:
    """Returns why no part of a workflow can run ahead of the stages that learn, "" if one can."""
    back, repeated = workflow.back(), workflow.repeated()
    if not workflow.weight_edges:
        return "has no weight edge, so no weights can be stale"
    if not set(workflow.stages) - back:
        return f"has no stage that could run ahead: all of them learn or get data of one that does ({sorted(back)})"
    if repeated & back:
        return f"repeats {sorted(repeated)} until there is enough data, but {sorted(repeated & back)} cannot run ahead"
    return ""


def _problems(plan: Plan, workflow: Workflow) -> Iterator[str]:
    placed = Counter(stage for item in plan.items for stage in item.stages)
    missing, unknown = sorted(set(workflow.stages) - set(placed)), sorted(set(placed) - set(workflow.stages))
    twice = sorted(stage for stage, number in placed.items() if number > 1)
    if missing or unknown or twice:
        todo = [f"add {missing}"] * bool(missing) + [f"place {twice} once"] * bool(twice)
        todo += [f"remove {unknown}, or mark them optional (`stage?`)"] * bool(unknown)
        yield f"must place each stage of {workflow.name}, {sorted(workflow.stages)}, exactly once: {' and '.join(todo)}"
    for item in plan.items:
        yield from _problems_of_item(item, workflow)
        for place in item.places:
            yield from _problems_of_place(place, item.chunks, workflow)
    position = {stage: number for number, stage in enumerate(plan.places())}
    inside = {hop for loop in workflow.loops.values() for hop in loop.hops()}
    for a, b in ((edge.source, edge.target) for edge in workflow.edges):
        if position[a] > position[b] and (a, b) not in inside:
            yield f"has {b} before {a}, but edge {a} -> {b} requires the opposite: swap them"
    for a, b in plan.exclusive:
        if not {a, b} <= set(position):
            yield f"has {a} and {b} exclusive, but its stages are {sorted(position)}: correct the pair"
        elif b in plan.item_of(a).stages and set(plan.places()[a].devices) & set(plan.places()[b].devices):
            yield f"has {a} and {b} exclusive, but they alternate on the same devices: make separate items of them"


def _problems_of_item(item: Item, workflow: Workflow) -> Iterator[str]:
    stages, where = list(item.stages), f"streams {list(item.stages)} in {item.chunks} chunks"
    loop = next((loop for stage in stages if (loop := workflow.loop_of(stage))), None)
    if loop is not None and sorted(stages) != sorted(loop.sides):
        sides = " | ".join(f"{side} on ..." for side in loop.sides)
        yield f"has an item of {stages}, but a loop ({loop.name}) is an item of its two sides: write `{sides}`"
    if loop is not None and item.chunks > 1:
        yield f"streams the loop {loop.name}, but a loop passes its blocks on when it ends: leave out the chunks"
    if loop is None and item.shards != 1:
        yield f"gives {stages} {item.shards} shards, but only loops have shards: use chunks"
    if item.shards > workflow.num_blocks:
        few = f"has {stages} in {item.shards} shards, but each needs a block of the {workflow.num_blocks}"
        yield f"{few}: {workflow.more_blocks}, or use 1 shard"
    if item.chunks < 1 or workflow.num_blocks % item.chunks:
        yield f"{where}, but the {workflow.num_blocks} blocks do not divide by it: use a divisor"
    whole = [stage for stage in stages if workflow.stages[stage].whole] + workflow.blocking(stages)
    if item.chunks > 1 and whole:
        yield f"{where}, but {', '.join(whole)} needs all blocks at once: make separate items"


def _problems_of_place(place: Place, chunks: int, workflow: Workflow) -> Iterator[str]:
    stage, devices, blocks = place.stage, list(place.devices), list(place.blocks)
    most, batch = workflow.most_devices(stage, workflow.num_blocks // chunks), workflow.stages[stage].blocks_per_batch
    each = workflow.stages[stage].devices_per_worker
    if not devices or len(set(devices)) < len(devices):
        yield f"gives {stage} the devices {devices}, but it needs each one once: correct the list"
    if len(devices) > most:
        what = f"{most // each} blocks per call" if batch == 1 else f"{most // each} batches of {batch} blocks"
        few = f"gives {stage} {len(devices)} devices, but there are only {what}, so some get none"
        yield f"{few}: {workflow.more_blocks}, fewer chunks or fewer devices"
    if place.devices != with_lent(whole(devices, each), each):
        few = f"gives {stage} the devices {devices}, but each of its workers has {each} neighbouring ones"
        yield f"{few}, the first a multiple of {each}: use such groups, for example 0-{each - 1}"
    if not blocks:
        return
    where = f"gives the devices of {stage} {blocks} blocks"
    if len(blocks) * each != len(devices) or min(blocks) < 1 or sum(blocks) != workflow.num_blocks:
        yield (
            f"{where}, but these are {len(devices) // each} workers, each with at least one, and {workflow.num_blocks} "
            "blocks in all: make them add up, or leave them out for an even division"
        )
    unit = batch if batch > 1 else chunks
    if any(number % unit for number in blocks):
        why = f"works on {batch} blocks at a time" if batch > 1 else f"is called for {chunks} equal chunks"
        yield f"{where}, but it {why}: use multiples of {unit}"
