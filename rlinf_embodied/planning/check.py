"""Whether a plan can run a workflow: stages placed once and in order, streaming and ahead only where they may be."""

from __future__ import annotations

from collections import Counter

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.plan import Item, Place, Plan
from rlinf_embodied.workflow.graph import Workflow


def check(plan: Plan, workflow: Workflow) -> None:
    """Checks a plan against the workflow that it is to run.

    Raises:
        PlanError: names the stage, loop or edge, the rule that it breaks, and what to do.
    """
    _check_stages(plan, workflow)
    for item in plan.items:
        _check_item(plan.name, item, workflow)
        for place in item.places:
            _check_place(plan.name, place, item.chunks, workflow)
    _check_order(plan, workflow)
    _check_exclusive(plan)
    check_staleness(plan.name, plan.staleness, workflow)


def check_staleness(name: str, staleness: int, workflow: Workflow) -> None:
    """Checks that a workflow has something to run ahead of, and something that can, where a plan's staleness asks so.

    Raises:
        PlanError: it has no weight edge, or all of its stages get data of a stage that makes weights.
    """
    if staleness == 0:
        return
    where = f"plan.{name}.staleness is {staleness}"
    if not workflow.weight_edges:
        raise PlanError(
            f"{where}, but the workflow {workflow.name} passes no weights on, so that none can be stale: use 0"
        )
    if not set(workflow.stages) - workflow.back():
        raise PlanError(
            f"{where}, but every stage of the workflow {workflow.name} makes weights or gets data of one that does "
            f"({sorted(workflow.back())}), so that none can run ahead: use 0"
        )
    again = workflow.repeated()
    if again & workflow.back():
        raise PlanError(
            f"{where}, but the workflow {workflow.name} repeats {sorted(again)} until there is enough, of which "
            f"{sorted(again & workflow.back())} are of the part that cannot run ahead: use 0"
        )


def runs_ahead(workflow: Workflow) -> bool:
    """Returns whether a workflow has a part that can run ahead of what makes its weights."""
    try:
        check_staleness("", 1, workflow)
    except PlanError:
        return False
    return True


def _check_stages(plan: Plan, workflow: Workflow) -> None:
    placed = Counter(stage for item in plan.items for stage in item.stages)
    missing, unknown = set(workflow.stages) - set(placed), set(placed) - set(workflow.stages)
    twice = sorted(stage for stage, number in placed.items() if number > 1)
    if not (missing or unknown or twice):
        return
    todo = [f"add {sorted(missing)}"] * bool(missing) + [
        f"remove {sorted(unknown)}, or mark them optional (`stage?`)"
    ] * bool(unknown)
    todo += [f"place {twice} once"] * bool(twice)
    raise PlanError(
        f"plan {plan.name} places the stages {sorted(placed.elements())}, but the workflow {workflow.name} has "
        f"{sorted(workflow.stages)}, each to be placed exactly once: {' and '.join(todo)}"
    )


def _check_item(name: str, item: Item, workflow: Workflow) -> None:
    loops = {loop.name: loop for stage in item.stages if (loop := workflow.loop_of(stage))}
    for loop in loops.values():
        if sorted(item.stages) != sorted(loop.sides):
            raise PlanError(
                f"plan {name} has an item of {list(item.stages)}, but the loop {loop.name} is an item of "
                f"{' and '.join(loop.sides)} alone: write `{' | '.join(f'{side} on ...' for side in loop.sides)}`"
            )
        if item.chunks > 1:
            raise PlanError(
                f"plan {name} streams the loop {loop.name} in {item.chunks} chunks, but a loop passes its blocks on "
                "when it ends: leave out the chunks"
            )
        if not 1 <= item.shards <= workflow.num_blocks:
            raise PlanError(
                f"plan {name} has the loop {loop.name} in {item.shards} shards, but each needs a block, of which there "
                f"are {workflow.num_blocks}: {workflow.more_blocks}, or use 1 shard"
            )
    if not loops and item.shards != 1:
        raise PlanError(
            f"plan {name} gives {list(item.stages)} {item.shards} shards, but only loops have shards: use chunks"
        )
    if not loops and len(item.stages) > 1 and item.chunks == 1:
        raise PlanError(
            f"plan {name} has {list(item.stages)} in one item, but they do not stream: make an item of each"
        )
    if item.chunks < 1 or workflow.num_blocks % item.chunks:
        raise PlanError(
            f"plan {name} streams {list(item.stages)} in {item.chunks} chunks, but the {workflow.num_blocks} blocks do "
            "not divide by it: use a divisor"
        )
    if item.chunks > 1:
        _check_streams(name, item, workflow)


def _check_streams(name: str, item: Item, workflow: Workflow) -> None:
    size = workflow.num_blocks // item.chunks
    where = f"plan {name} streams {list(item.stages)} in chunks of {size} blocks"
    for stage in item.stages:
        if not workflow.stages[stage].accepts(size, workflow.num_blocks):
            raise PlanError(
                f"{where}, but {stage} accepts {workflow.stages[stage].granularities} blocks per call (0: all): use "
                "one of these, or make it a separate item"
            )
    blocking = workflow.blocking(item.stages, item.stages, size)
    if blocking:
        raise PlanError(
            f"{where}, but {', '.join(blocking)} passes all blocks on at once: make separate items of its ends"
        )


def _check_place(name: str, place: Place, chunks: int, workflow: Workflow) -> None:
    stage, size = place.stage, workflow.num_blocks // chunks
    most, batch = workflow.most_devices(stage, size), workflow.stages[stage].blocks_per_batch
    if not place.devices or len(set(place.devices)) < len(place.devices):
        raise PlanError(
            f"plan {name} gives {stage} the devices {list(place.devices)}, but it needs each one once: correct the list"
        )
    if len(place.devices) > most:
        what = f"{most} blocks per call" if batch == 1 else f"{most} batches of {batch} blocks"
        raise PlanError(
            f"plan {name} gives {stage} {len(place.devices)} devices, but there are only {what}, so some get none: "
            f"{workflow.more_blocks}, fewer chunks or fewer devices"
        )
    if not place.blocks:
        return
    where = f"plan {name} gives the devices of {stage} {list(place.blocks)} blocks"
    if len(place.blocks) != len(place.devices) or min(place.blocks) < 1 or sum(place.blocks) != workflow.num_blocks:
        raise PlanError(
            f"{where}, but these are {len(place.devices)} devices, each with at least one, and {workflow.num_blocks} "
            "blocks in all: make them add up, or leave them out for an even division"
        )
    unit = batch if batch > 1 else chunks
    if any(blocks % unit for blocks in place.blocks):
        why = f"it works on {batch} blocks at a time" if batch > 1 else f"it is called for {chunks} equal chunks"
        raise PlanError(f"{where}, but {why}: use multiples of {unit}")


def _check_order(plan: Plan, workflow: Workflow) -> None:
    position = {stage: number for number, stage in enumerate(plan.places())}
    for edge in workflow.edges:
        loop = workflow.loop_of(edge.source)
        inside = loop is not None and edge.target in loop.sides
        if position[edge.source] > position[edge.target] and not inside:
            raise PlanError(
                f"plan {plan.name} has {edge.target} before {edge.source}, but edge {edge.source} -> {edge.target} "
                "requires the opposite: swap them"
            )


def _check_exclusive(plan: Plan) -> None:
    for a, b in plan.exclusive:
        if a not in plan.places() or b not in plan.places() or a == b:
            raise PlanError(
                f"plan {plan.name} has {a} and {b} exclusive, but its stages are {sorted(plan.places())}: correct it"
            )
        shared = set(plan.places()[a].devices) & set(plan.places()[b].devices)
        if shared and b in plan.item_of(a).stages:
            raise PlanError(
                f"plan {plan.name} has {a} and {b} exclusive, but they alternate on the devices {sorted(shared)} in an "
                "item: make separate items of them, or leave out the exclusion"
            )
