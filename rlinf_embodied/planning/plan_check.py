"""Whether a plan can run a workflow: all stages placed once, in order, streaming and ahead only where they may be."""

from __future__ import annotations

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.tree import Leaf, LoopNode, Node, Spatial, leaves, nodes
from rlinf_embodied.workflow.graph import WHOLE, Workflow


def require_runnable(name: str, tree: Node, workflow: Workflow) -> None:
    """Checks a plan tree against the workflow that it is to run.

    Raises:
        PlanError: names the stage, loop, edge or node, the rule that it breaks, and what to do.
    """
    placed = [leaf.stage for leaf in leaves(tree)]
    if sorted(placed) != sorted(workflow.stages):
        raise PlanError(
            f"plan {name} places the stages {sorted(placed)}, but the workflow {workflow.name} has "
            f"{sorted(workflow.stages)}: every stage must be placed exactly once; {_what_differs(placed, workflow)}"
        )
    for leaf in leaves(tree):
        most = workflow.most_devices(leaf.stage, workflow.num_blocks)
        if len(leaf.devices) > most and most < workflow.num_blocks:
            raise PlanError(
                f"plan {name} gives {leaf.stage} {len(leaf.devices)} devices, but it works on "
                f"{workflow.stages[leaf.stage].blocks_per_batch} blocks at a time, of which there are {most} sets: "
                f"{workflow.more_blocks} or fewer devices"
            )
        if len(leaf.devices) > workflow.num_blocks:
            raise PlanError(
                f"plan {name} gives {leaf.stage} {len(leaf.devices)} devices, but there are only "
                f"{workflow.num_blocks} blocks: {workflow.more_blocks} or fewer devices"
            )
        _check_shares(name, leaf, workflow)
    for node in nodes(tree):
        if isinstance(node, LoopNode):
            _check_loop(name, node, workflow)
    if missing := set(workflow.loops) - {node.loop for node in nodes(tree) if isinstance(node, LoopNode)}:
        raise PlanError(
            f"plan {name} places the stages of {sorted(missing)}, but not as a loop: give each loop a loop node"
        )
    _check_spatial(name, tree, workflow, WHOLE)
    _check_order(name, tree, workflow)


def require_staleness(name: str, staleness: int, workflow: Workflow) -> None:
    """Checks that a workflow has something to run ahead of, and something that can, where a plan's staleness asks so.

    Raises:
        PlanError: it has no weight edge, or all of its stages get data of a stage that makes weights.
    """
    if staleness == 0:
        return
    where = f"plan.{name}.staleness is {staleness}"
    if not workflow.weight_edges:
        raise PlanError(
            f"{where}, but the workflow {workflow.name} passes no weights on, so that nothing can be stale: use 0"
        )
    if not set(workflow.stages) - workflow.back():
        raise PlanError(
            f"{where}, but every stage of the workflow {workflow.name} makes weights or gets data of one that does "
            f"({sorted(workflow.back())}), so that none can run ahead: use 0"
        )
    again = workflow.upstream(workflow.repeat.before) if workflow.repeat else set()
    if again & workflow.back():
        raise PlanError(
            f"{where}, but the workflow {workflow.name} does {sorted(again)} again until there is enough, of which "
            f"{sorted(again & workflow.back())} are of the part that cannot run ahead: use 0"
        )


def _what_differs(placed: list[str], workflow: Workflow) -> str:
    missing, extra = sorted(set(workflow.stages) - set(placed)), sorted(set(placed) - set(workflow.stages))
    turns = sorted(set(missing) & {stage for loop in workflow.loops.values() for stage in loop.sides})
    leaves = [stage for stage in missing if stage not in turns]
    parts = [f"add leaves for {leaves}"] * bool(leaves) + [f"add {turns} to the stages of its loop"] * bool(turns)
    parts += [f"take out {extra}, or mark them optional"] * bool(extra)
    return " and ".join(parts or ["take out what is there twice"])


def _check_shares(name: str, leaf: Leaf, workflow: Workflow) -> None:
    where = f"plan {name} gives {leaf.stage} shares of {list(leaf.shares)}"
    assert not leaf.shares or (len(leaf.shares) == len(leaf.devices) and min(leaf.shares) > 0), where
    if leaf.shares and sum(leaf.shares) != workflow.num_blocks:
        raise PlanError(
            f"{where}, {sum(leaf.shares)} blocks in all, but there are {workflow.num_blocks} blocks: make them add up"
        )
    size = workflow.stages[leaf.stage].blocks_per_batch
    if any(share % size for share in leaf.shares):
        raise PlanError(f"{where}, but it works on {size} blocks at a time: use multiples of {size}")


def _check_order(name: str, tree: Node, workflow: Workflow) -> None:
    place = {leaf.stage: number for number, leaf in enumerate(leaves(tree))}
    ends = [set(loop.sides) for loop in workflow.loops.values()]
    pairs = [(f"edge {e.source} -> {e.target}", e.source, e.target) for e in workflow.edges]
    for what, first, second in pairs:
        if place[first] > place[second] and not any({first, second} <= sides for sides in ends):
            raise PlanError(
                f"plan {name} puts {second} before {first}, but {what} wants it after: swap the parts of the tree"
            )


def _check_spatial(name: str, node: Node, workflow: Workflow, chunk: int) -> None:
    """Checks disjoint devices, and that all that streams may; `chunk` is the granularity of the nodes around."""
    if isinstance(node, LoopNode) and chunk:
        raise PlanError(
            f"plan {name} has the loop {node.loop} inside a spatial node of granularity {chunk}, but a loop hands "
            "its blocks on when it ends: put it before that node"
        )
    if isinstance(node, Leaf) and chunk and not workflow.stages[node.stage].accepts(chunk, workflow.num_blocks):
        sizes = workflow.stages[node.stage].granularities
        raise PlanError(
            f"plan {name} calls {node.stage} for {chunk} blocks at a time, but it accepts {sizes} (0: all): use "
            "one of these as granularity, or a plan that has it behind the spatial node"
        )
    if isinstance(node, Leaf) and chunk and workflow.stages[node.stage].blocks_per_batch == 1:
        chunks = workflow.num_blocks // chunk
        if any(share % chunks for share in node.shares):
            raise PlanError(
                f"plan {name} gives {node.stage} shares of {list(node.shares)}, but calls it for {chunk} blocks at a "
                f"time, {chunks} times: use multiples of {chunks}, so that each chunk is shared alike"
            )
    if isinstance(node, (Leaf, LoopNode)):
        return
    if isinstance(node, Spatial):
        _check_parts(name, node, workflow)
        chunk = chunk or node.granularity
    for part in node.parts:
        _check_spatial(name, part, workflow, chunk)
    if isinstance(node, Spatial):
        _check_streams(name, node, workflow, chunk)


def _check_parts(name: str, node: Spatial, workflow: Workflow) -> None:
    used = [device for part in node.parts for device in {d for leaf in leaves(part) for d in leaf.devices}]
    if len(set(used)) != len(used):
        raise PlanError(f"plan {name}: the parts of a spatial node share devices: give each its own")
    if node.granularity < 0 or (node.granularity and workflow.num_blocks % node.granularity):
        raise PlanError(
            f"plan {name}: a spatial node has granularity {node.granularity}, but chunks divide the "
            f"{workflow.num_blocks} blocks: use a divisor, or 0 for all at once"
        )


def _check_streams(name: str, node: Spatial, workflow: Workflow, chunk: int) -> None:
    names = [[leaf.stage for leaf in leaves(part)] for part in node.parts]
    for i, later in enumerate(names):
        earlier = [stage for part in names[:i] for stage in part]
        blocking = workflow.blocking(earlier, later, chunk) if chunk else []
        if blocking:
            raise PlanError(
                f"plan {name} streams {chunk} blocks at a time, but {', '.join(blocking)} passes on all blocks at "
                "once: use granularity 0, or put these stages in a temporal node"
            )


def _check_loop(name: str, node: LoopNode, workflow: Workflow) -> None:
    if node.loop not in workflow.loops:
        raise PlanError(f"plan {name} has a loop {node.loop!r}, but the workflow has {sorted(workflow.loops)}")
    loop = workflow.loops[node.loop]
    if sorted(leaf.stage for leaf in node.stages) != sorted(loop.sides):
        raise PlanError(f"plan {name}: loop {node.loop} is made of {loop.opener} and {loop.answerer}: place both")
    if not 1 <= node.shards <= workflow.num_blocks:
        raise PlanError(
            f"plan {name}: loop {node.loop} has {node.shards} shards, but each has a block at least, of which there "
            f"are {workflow.num_blocks}: {workflow.more_blocks}, or shards: {workflow.num_blocks}"
        )
