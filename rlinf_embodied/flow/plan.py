"""The micro flow: a plan is a tree of Leaf | Temporal | Spatial | Loop, read from a file and resolved for a cluster.

In a file, devices are `all` or a range of fractions "a/b:c/d" of the cluster's devices; resolved, they are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlinf_embodied.errors import PlanError
from rlinf_embodied.flow.graph import WHOLE, Workflow

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage on its devices."""

    stage: str
    devices: Devices


@dataclass(frozen=True, slots=True)
class LoopNode:
    """A loop of the workflow: each of its stages on its devices, with `shards` parts of the blocks in flight."""

    loop: str
    stages: tuple[Leaf, ...]
    shards: int


@dataclass(frozen=True, slots=True)
class Temporal:
    """Parts that take turns; they may share devices.

    Where they do not fit together (`resident` is false), the part whose turn ends leaves the devices' memory before the
    next one enters.
    """

    parts: tuple[Node, ...]
    resident: bool = True


@dataclass(frozen=True, slots=True)
class Spatial:
    """Parts on disjoint devices that stream to each other in chunks of `granularity` blocks (0: all at once)."""

    parts: tuple[Node, ...]
    granularity: int = WHOLE


Node = Leaf | LoopNode | Temporal | Spatial


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan tree for `num_devices` devices."""

    name: str
    num_devices: int
    tree: Node

    def leaves(self) -> dict[str, Leaf]:
        """Returns each stage's leaf, in the order of the tree."""
        return {leaf.stage: leaf for leaf in leaves(self.tree)}

    def loops(self) -> dict[str, LoopNode]:
        """Returns each loop's node by its name."""
        return {node.loop: node for node in nodes(self.tree) if isinstance(node, LoopNode)}

    def devices(self) -> Devices:
        """Returns all devices that the plan uses."""
        return tuple(sorted({device for leaf in leaves(self.tree) for device in leaf.devices}))

    def granularity(self, stage: str) -> int:
        """Returns in how many blocks per call a stage works; WHOLE: in all of them."""
        return _granularity(self.tree, stage) or WHOLE

    def owners(self, stage: str, num_blocks: int) -> tuple[int, ...]:
        """Returns the device that owns each block of a stage: contiguous and as even as possible within a chunk."""
        devices, chunk = self.leaves()[stage].devices, self.granularity(stage) or num_blocks
        return tuple(devices[block % chunk * len(devices) // chunk] for block in range(num_blocks))

    def exclusive(self) -> dict[str, frozenset[str]]:
        """Returns for each stage those that may not be in a device's memory together with it."""
        found: dict[str, set[str]] = {stage: set() for stage in self.leaves()}
        for node in nodes(self.tree):
            if isinstance(node, Temporal) and not node.resident:
                parts = [{leaf.stage for leaf in leaves(part)} for part in node.parts]
                for i, part in enumerate(parts):
                    others = set().union(*parts[:i], *parts[i + 1 :])
                    for stage in part:
                        found[stage] |= others
        return {stage: frozenset(others) for stage, others in found.items()}

    def to_dict(self) -> dict[str, object]:
        """Returns the plan as JSON-ready data (what plan.json holds)."""
        return {"name": self.name, "num_devices": self.num_devices, "tree": _to_dict(self.tree)}


def nodes(node: Node) -> Iterator[Node]:
    """Yields a node and all nodes below it, from left to right."""
    yield node
    if isinstance(node, (Temporal, Spatial)):
        for part in node.parts:
            yield from nodes(part)


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the stages of a tree with their devices, those inside loops too, from left to right."""
    for inner in nodes(node):
        if isinstance(inner, Leaf):
            yield inner
        elif isinstance(inner, LoopNode):
            yield from inner.stages


def _granularity(node: Node, stage: str) -> int | None:
    """Returns the granularity of the outermost chunked node around a stage; None where the stage is not below."""
    if isinstance(node, (Leaf, LoopNode)):
        return WHOLE if any(leaf.stage == stage for leaf in leaves(node)) else None
    inner = next((found for part in node.parts if (found := _granularity(part, stage)) is not None), None)
    return node.granularity or inner if isinstance(node, Spatial) and inner is not None else inner


def _to_dict(node: Node) -> dict[str, object]:
    if isinstance(node, Leaf):
        return {"leaf": {"stage": node.stage, "devices": list(node.devices)}}
    if isinstance(node, LoopNode):
        stages = {leaf.stage: list(leaf.devices) for leaf in node.stages}
        return {"loop": {"name": node.loop, "shards": node.shards, "stages": stages}}
    parts = [_to_dict(part) for part in node.parts]
    if isinstance(node, Temporal):
        return {"temporal": parts if node.resident else {"resident": False, "parts": parts}}
    return {"spatial": {"granularity": node.granularity, "parts": parts} if node.granularity else parts}


def parse_devices(text: object, num_devices: int, path: str) -> Devices:
    """Returns device numbers for `all`, "a/b:c/d" (fractions of the devices) or a list of numbers.

    Raises:
        PlanError: not of that form, empty, or beyond the cluster.
    """
    if isinstance(text, (list, tuple)):
        devices = tuple(int(number) for number in text)
    elif text == "all":
        devices = tuple(range(num_devices))
    else:
        try:
            low, high = (Fraction(part) for part in str(text).split(":"))
        except (ValueError, ZeroDivisionError):
            raise PlanError(
                f"{path}.devices is {text!r}, but it is `all`, a range like '0:1/2' or a list of numbers: mend the plan"
            ) from None
        devices = tuple(range(int(low * num_devices), int(high * num_devices)))
    if not devices:
        raise PlanError(
            f"{path}.devices is {text!r}, which is no device of {num_devices}: use a larger cluster or range"
        )
    if min(devices) < 0 or max(devices) >= num_devices:
        raise PlanError(
            f"{path}.devices is {text!r}, but the cluster has the devices 0..{num_devices - 1}: "
            "set cluster.num_devices or use a plan made for this cluster"
        )
    return devices


def _parse(data: object, num_devices: int, path: str) -> Node:
    kinds = ("leaf", "loop", "temporal", "spatial")
    if not isinstance(data, Mapping) or len(data) != 1 or next(iter(data)) not in kinds:
        raise PlanError(f"{path} is {data!r}, but a node has exactly one key of {list(kinds)}: mend the plan file")
    ((kind, body),) = data.items()
    here = f"{path}.{kind}"
    if kind in ("temporal", "spatial"):
        return _parse_parts(kind, body, num_devices, here)
    try:
        if kind == "leaf":
            return Leaf(body["stage"], parse_devices(body["devices"], num_devices, here))
        stages = tuple(Leaf(s, parse_devices(d, num_devices, f"{here}.{s}")) for s, d in body["stages"].items())
        return LoopNode(body["name"], stages, int(body.get("shards", 1)))
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"{here} is {body!r}, and {error} is missing or of the wrong kind: mend the plan file"
        ) from error


def _parse_parts(kind: str, body: object, num_devices: int, here: str) -> Node:
    """Returns a node with parts: a list of them, or a mapping of `parts` and the node's setting."""
    setting = {"temporal": "resident", "spatial": "granularity"}[kind]
    data = body if isinstance(body, Mapping) else {"parts": body}
    parts = data.get("parts")
    if not isinstance(parts, (list, tuple)) or not parts or set(data) - {"parts", setting}:
        raise PlanError(f"{here} is {body!r}, but it is a list of nodes, or has `parts` and `{setting}`: mend the plan")
    nodes = tuple(_parse(part, num_devices, f"{here}[{i}]") for i, part in enumerate(parts))
    if kind == "temporal":
        return Temporal(nodes, bool(data.get("resident", True)))
    return Spatial(nodes, int(str(data.get("granularity", WHOLE))))


def _least(variant: Mapping[str, object]) -> int:
    """Returns the number of devices that a variant of a plan needs at least."""
    return int(str(variant.get("min_devices", 1)))


def resolve(name: str, trees: Sequence[Mapping[str, object]], num_devices: int, workflow: Workflow) -> Plan:
    """Returns the plan for a cluster: the first variant that the devices suffice for, checked against the workflow.

    Args:
        name: for messages and plan.json.
        trees: variants `{min_devices, tree}`; the one with the largest min_devices that fits is taken.
        num_devices: devices of the cluster.
        workflow: what the plan is for.

    Raises:
        PlanError: no variant fits, a stage is missing or unknown, or there are too few blocks.
    """
    fitting = [variant for variant in trees if _least(variant) <= num_devices]
    if not fitting:
        least = min(_least(variant) for variant in trees)
        raise PlanError(
            f"plan {name} needs at least {least} devices, but cluster.num_devices is {num_devices}: "
            "use plan=collocated or a larger cluster"
        )
    variant = max(fitting, key=lambda v: _least(v))
    plan = Plan(name, num_devices, _parse(variant["tree"], num_devices, f"plan.{name}"))
    _check(plan, workflow)
    return plan


def _check(plan: Plan, workflow: Workflow) -> None:
    placed = [leaf.stage for leaf in leaves(plan.tree)]
    if sorted(placed) != sorted(workflow.stages):
        raise PlanError(
            f"plan {plan.name} places the stages {sorted(placed)}, but the workflow {workflow.name} has "
            f"{sorted(workflow.stages)}: every stage must be placed exactly once"
        )
    for stage, leaf in plan.leaves().items():
        if len(leaf.devices) > workflow.num_blocks:
            raise PlanError(
                f"plan {plan.name} gives {stage} {len(leaf.devices)} devices, but there are only "
                f"{workflow.num_blocks} blocks: use more env.num_envs, a smaller env.block_size or fewer devices"
            )
    for node in plan.loops().values():
        _check_loop(plan, node, workflow)
    _check_spatial(plan, plan.tree, workflow, WHOLE)
    _check_order(plan, workflow)


def _check_order(plan: Plan, workflow: Workflow) -> None:
    place = {stage: number for number, stage in enumerate(plan.leaves())}
    ends = [{loop.opener, loop.answerer} for loop in workflow.loops.values()]
    pairs = [(f"edge {e.source} -> {e.target}", e.source, e.target) for e in workflow.edges]
    pairs += [(f"barrier {b.before} | {b.after}", b.before, b.after) for b in workflow.barriers]
    for what, first, second in pairs:
        if place[first] > place[second] and {first, second} not in ends:
            raise PlanError(
                f"plan {plan.name} puts {second} before {first}, but {what} wants it after: swap the parts of the tree"
            )


def _check_spatial(plan: Plan, node: Node, workflow: Workflow, chunk: int) -> None:
    """Checks disjoint devices, and that all that streams may; `chunk` is the granularity of the nodes around."""
    if isinstance(node, LoopNode) and chunk:
        raise PlanError(
            f"plan {plan.name} has the loop {node.loop} inside a spatial node of granularity {chunk}, but a loop hands "
            "its blocks on when it ends: put it before that node"
        )
    if isinstance(node, Leaf) and chunk and not workflow.stages[node.stage].accepts(chunk, workflow.num_blocks):
        sizes = workflow.stages[node.stage].granularities
        raise PlanError(
            f"plan {plan.name} calls {node.stage} for {chunk} blocks at a time, but it accepts {sizes} (0: all): use "
            "one of these as granularity"
        )
    if isinstance(node, (Leaf, LoopNode)):
        return
    if isinstance(node, Spatial):
        _check_parts(plan, node, workflow)
        chunk = chunk or node.granularity
    for part in node.parts:
        _check_spatial(plan, part, workflow, chunk)
    if isinstance(node, Spatial):
        _check_streams(plan, node, workflow, chunk)


def _check_parts(plan: Plan, node: Spatial, workflow: Workflow) -> None:
    used = [device for part in node.parts for device in {d for leaf in leaves(part) for d in leaf.devices}]
    if len(set(used)) != len(used):
        raise PlanError(f"plan {plan.name}: the parts of a spatial node share devices: give each its own")
    if node.granularity < 0 or (node.granularity and workflow.num_blocks % node.granularity):
        raise PlanError(
            f"plan {plan.name}: a spatial node has granularity {node.granularity}, but chunks divide the "
            f"{workflow.num_blocks} blocks: use a divisor, or 0 for all at once"
        )


def _check_streams(plan: Plan, node: Spatial, workflow: Workflow, chunk: int) -> None:
    names = [[leaf.stage for leaf in leaves(part)] for part in node.parts]
    for i, later in enumerate(names):
        earlier = [stage for part in names[:i] for stage in part]
        blocking = workflow.blocking(earlier, later, chunk) if chunk else []
        if blocking:
            raise PlanError(
                f"plan {plan.name} streams {chunk} blocks at a time, but {', '.join(blocking)} passes on all blocks at "
                "once: use granularity 0, or put these stages in a temporal node"
            )


def _check_loop(plan: Plan, node: LoopNode, workflow: Workflow) -> None:
    if node.loop not in workflow.loops:
        raise PlanError(f"plan {plan.name} has a loop {node.loop!r}, but the workflow has {sorted(workflow.loops)}")
    loop = workflow.loops[node.loop]
    if sorted(leaf.stage for leaf in node.stages) != sorted((loop.opener, loop.answerer)):
        raise PlanError(f"plan {plan.name}: loop {node.loop} is made of {loop.opener} and {loop.answerer}: place both")
    for leaf in node.stages:
        least = workflow.num_blocks // len(leaf.devices)
        if not 1 <= node.shards <= least:
            raise PlanError(
                f"plan {plan.name}: loop {node.loop} has {node.shards} shards, but a worker of {leaf.stage} has only "
                f"{least} block(s): use a smaller env.block_size, more env.num_envs, or shards: {least}"
            )
