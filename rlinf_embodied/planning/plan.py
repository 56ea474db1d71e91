"""The micro flow: a plan is a tree of Leaf | Temporal | Spatial | Loop, read from a file and resolved for a cluster.

In a file, devices are `all` or a range of fractions "a/b:c/d" of the cluster's devices; resolved, they are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import MAX_STALENESS
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.calls import owners
from rlinf_embodied.planning.plan_check import require_runnable, require_staleness
from rlinf_embodied.planning.tree import Devices, Leaf, LoopNode, Node, Spatial, Temporal, granularity, leaves, nodes
from rlinf_embodied.workflow.graph import WHOLE, Workflow

_SHARE = r"(\d{1,9}(?:/0{0,8}[1-9]\d{0,8}|\.\d{1,9})?)"
_RANGE = re.compile(rf"{_SHARE}:{_SHARE}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan tree for `num_devices` devices.

    With a staleness of k, the stages before the weights' sources work up to k iterations ahead of them: those of
    iteration i with the weights that iteration i - k - 1 made (at the start of a run: with those that there are).
    """

    name: str
    num_devices: int
    tree: Node
    staleness: int = 0

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
        return granularity(self.tree, stage) or WHOLE

    def owners(self, stage: str, num_blocks: int, blocks_per_batch: int = 1) -> tuple[int, ...]:
        """Returns the device that owns each block of a stage: see `calls.owners`."""
        chunk = self.granularity(stage) or num_blocks
        return owners(self.leaves()[stage], num_blocks, chunk, blocks_per_batch)

    def all_owners(self, workflow: Workflow) -> dict[str, tuple[int, ...]]:
        """Returns the device that owns each block, by stage."""
        blocks = workflow.num_blocks
        return {name: self.owners(name, blocks, spec.blocks_per_batch) for name, spec in workflow.stages.items()}

    def shares_workers(self, loop: str, num_blocks: int) -> bool:
        """Returns whether every block has all sides of a loop in one worker."""
        first, *others = (self.owners(leaf.stage, num_blocks) for leaf in self.loops()[loop].stages)
        return all(other == first for other in others)

    def is_fused(self, loop: str, num_blocks: int, cluster: Cluster) -> bool:
        """Returns whether a loop is one call per worker: all its sides are there, and their data may stay there."""
        return not cluster.always_store and self.shares_workers(loop, num_blocks)

    def shards(self, stage: str, num_blocks: int, cluster: Cluster) -> int:
        """Returns in how many parts a stage gets its blocks: the shards of its loop, one where that is one call."""
        for loop, node in self.loops().items():
            if any(leaf.stage == stage for leaf in node.stages):
                return 1 if self.is_fused(loop, num_blocks, cluster) else node.shards
        return 1

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
        found: dict[str, object] = {"name": self.name, "num_devices": self.num_devices, "tree": _to_dict(self.tree)}
        return found | {"staleness": self.staleness} if self.staleness else found


def _to_dict(node: Node) -> dict[str, object]:
    if isinstance(node, Leaf):
        return {"leaf": {"stage": node.stage, **_placed(node)}}
    if isinstance(node, LoopNode):
        stages = {leaf.stage: _placed(leaf) if leaf.shares else list(leaf.devices) for leaf in node.stages}
        return {"loop": {"name": node.loop, "shards": node.shards, "stages": stages}}
    parts = [_to_dict(part) for part in node.parts]
    if isinstance(node, Temporal):
        return {"temporal": parts if node.resident else {"resident": False, "parts": parts}}
    return {"spatial": {"granularity": node.granularity, "parts": parts} if node.granularity else parts}


def _placed(leaf: Leaf) -> dict[str, object]:
    found: dict[str, object] = {"devices": list(leaf.devices)}
    return found | {"shares": list(leaf.shares)} if leaf.shares else found


def parse_devices(text: object, num_devices: int, path: str, cores: Devices = ()) -> Devices:
    """Returns device numbers for `all`, "a/b:c/d" (fractions of the devices), `cores` or a list of numbers.

    Raises:
        PlanError: not of that form, empty, or beyond the cluster.
    """
    if isinstance(text, (list, tuple)):
        if any(isinstance(number, bool) or not isinstance(number, int) for number in text):
            raise PlanError(f"{path}.devices is {text!r}, but it is a list of whole numbers: mend the plan")
        devices = tuple(text)
    elif text == "all":
        devices = tuple(range(num_devices))
    elif text == "cores":
        devices = cores
    else:
        devices = _range_of(str(text), num_devices, path)
    if not devices:
        raise PlanError(
            f"{path}.devices is {text!r}, which is no device of {num_devices}: use a larger cluster or range"
        )
    if len(set(devices)) < len(devices):
        raise PlanError(f"{path}.devices is {text!r}, but a stage has each device once: mend the plan")
    if min(devices) < 0 or max(devices) >= num_devices + len(cores):
        raise PlanError(
            f"{path}.devices is {text!r}, but the cluster has the devices 0..{num_devices + len(cores) - 1}: "
            "set cluster.num_devices or use a plan made for this cluster"
        )
    return devices


def _range_of(text: str, num_devices: int, path: str) -> Devices:
    """Returns the devices between two shares of a cluster; none where there are none between them."""
    match = _RANGE.fullmatch(text)
    low, high = (Fraction(part) for part in match.groups()) if match else (Fraction(0), Fraction(2))
    if high > 1:
        raise PlanError(
            f"{path}.devices is {text!r}, but it is `all`, a range like '0:1/2' or a list of numbers: mend the plan"
        )
    return tuple(range(int(low * num_devices), int(high * num_devices)))


def _parse(data: object, known: tuple[int, Devices], path: str) -> Node:
    kinds = ("leaf", "loop", "temporal", "spatial")
    if not isinstance(data, Mapping) or len(data) != 1 or next(iter(data)) not in kinds:
        raise PlanError(f"{path} is {data!r}, but a node has exactly one key of {list(kinds)}: mend the plan file")
    ((kind, body),) = data.items()
    here = f"{path}.{kind}"
    if kind in ("temporal", "spatial"):
        return _parse_parts(kind, body, known, here)
    try:
        if kind == "leaf":
            return _leaf(body["stage"], body, known, here)
        stages = tuple(_leaf(s, d, known, f"{here}.{s}") for s, d in body["stages"].items())
        return LoopNode(_name(body["name"]), stages, int(body.get("shards", 1)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"{here} is {body!r}, and {error} is missing or of the wrong kind: mend the plan file"
        ) from error


def _leaf(stage: object, body: object, known: tuple[int, Devices], path: str) -> Leaf:
    """Returns a stage on what is said of its devices: them alone, or with the blocks of each."""
    if not isinstance(body, Mapping):
        return Leaf(_name(stage), parse_devices(body, known[0], path, known[1]))
    devices = parse_devices(body["devices"], known[0], path, known[1])
    shares = body.get("shares", ())
    numbers = isinstance(shares, (list, tuple)) and all(isinstance(n, int) and not isinstance(n, bool) for n in shares)
    if not numbers or ("shares" in body and (len(shares) != len(devices) or min(shares) < 1)):
        raise PlanError(
            f"{path}.shares is {shares!r}, but it is the number of blocks of each of the {len(devices)} devices, at "
            "least one: mend the plan, or leave it out for shares as even as possible"
        )
    return Leaf(_name(stage), devices, tuple(shares))


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name, not {value!r},")
    return value


def _parse_parts(kind: str, body: object, known: tuple[int, Devices], here: str) -> Node:
    """Returns a node with parts: a list of them, or a mapping of `parts` and the node's setting."""
    setting = {"temporal": "resident", "spatial": "granularity"}[kind]
    data = body if isinstance(body, Mapping) else {"parts": body}
    parts = data.get("parts")
    if not isinstance(parts, (list, tuple)) or not parts or set(data) - {"parts", setting}:
        raise PlanError(f"{here} is {body!r}, but it is a list of nodes, or has `parts` and `{setting}`: mend the plan")
    nodes = tuple(_parse(part, known, f"{here}[{i}]") for i, part in enumerate(parts))
    value = data.get(setting, kind == "temporal" or WHOLE)
    if not isinstance(value, bool if kind == "temporal" else int):
        wanted = "true or false" if kind == "temporal" else "a whole number"
        raise PlanError(f"{here}.{setting} is {value!r}, but it is {wanted}: mend the plan")
    return Temporal(nodes, bool(value)) if kind == "temporal" else Spatial(nodes, int(value))


def without_absent(data: object, workflow: Workflow) -> object:
    """Returns a tree without leaves and loops marked `optional` that the workflow lacks; None if nothing is left.

    A node with a single part left is that part.
    """
    if not isinstance(data, Mapping) or len(data) != 1:
        return data
    ((kind, body),) = data.items()
    if kind == "leaf" and isinstance(body, Mapping) and body.get("optional"):
        kept = {key: value for key, value in body.items() if key != "optional"}
        return {"leaf": kept} if body.get("stage") in workflow.stages else None
    if kind == "loop" and isinstance(body, Mapping) and body.get("optional"):
        kept = {key: value for key, value in body.items() if key != "optional"}
        return {"loop": kept} if set(body.get("stages", ())) & set(workflow.stages) else None
    if kind not in ("temporal", "spatial"):
        return data
    parts = body.get("parts") if isinstance(body, Mapping) else body
    if not isinstance(parts, (list, tuple)):
        return data
    left = [part for part in (without_absent(part, workflow) for part in parts) if part is not None]
    if len(left) == len(parts) or len(left) > 1:
        return {kind: {**body, "parts": left} if isinstance(body, Mapping) else left}
    return left[0] if left else None


def _range(variant: Mapping[str, object], name: str) -> tuple[int, float]:
    """Returns for how many devices a variant of a plan is, at least and at most."""
    least, most = variant.get("min_devices", 1), variant.get("max_devices", float("inf"))
    if not isinstance(least, int) or not isinstance(most, (int, float)) or variant.get("tree") is None:
        raise PlanError(
            f"plan {name} has the variant {dict(variant)!r}, but a variant has a `tree`, and `min_devices` is a whole "
            "number: mend the plan"
        )
    return least, most


def _staleness(variant: Mapping[str, object], name: str) -> int:
    """Returns how many iterations a variant's rollouts run ahead."""
    value = variant.get("staleness", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STALENESS:
        raise PlanError(
            f"plan.{name}.staleness is {value!r}, but it is a whole number of iterations from 0 to {MAX_STALENESS}: "
            "mend the plan, or leave it out for 0"
        )
    return value


def resolve_on(cluster: Cluster, name: str, trees: Sequence[Mapping[str, object]], workflow: Workflow) -> Plan:
    """Returns a named plan for the devices of a cluster that compute; for all of them where it does not fit these.

    Raises:
        PlanError: see `resolve`.
    """
    cores = cluster.cores_beside if workflow.of_cores() else ()
    try:
        return resolve(name, trees, cluster.num_computing, workflow, cores)
    except PlanError as error:
        if cluster.num_devices == cluster.num_computing:
            raise
        try:
            plan = resolve(name, trees, cluster.num_devices, workflow)
        except PlanError:
            raise error from None
        _require_places(plan, workflow, cores)
        return plan


def _require_places(plan: Plan, workflow: Workflow, cores: Devices) -> None:
    """Checks that what runs on cores only is on `cores`, and nothing else is."""
    for stage, leaf in plan.leaves().items() if cores else ():
        on_cores, only = set(leaf.devices) & set(cores), stage in workflow.of_cores()
        if only and on_cores != set(leaf.devices):
            raise PlanError(
                f"plan {plan.name} has {stage} on the devices {list(leaf.devices)}, but with cluster.cpu_devices it "
                f"runs on cores, which are {list(cores)}: give it `cores`, or leave cluster.cpu_devices out"
            )
        if on_cores and not only:
            raise PlanError(
                f"plan {plan.name} has {stage} on the devices {list(leaf.devices)}, of which {sorted(on_cores)} are "
                "cores for simulators (cluster.cpu_devices): give it accelerators"
            )


def resolve(
    name: str, trees: Sequence[Mapping[str, object]], num_devices: int, workflow: Workflow, cores: Devices = ()
) -> Plan:
    """Returns the plan for a cluster: the first variant that the devices suffice for, checked against the workflow.

    Args:
        name: for messages and plan.json.
        trees: variants `{min_devices, tree, staleness}`; the one with the largest min_devices that fits is taken.
        num_devices: devices of the cluster that `all` and shares mean.
        workflow: what the plan is for.
        cores: devices behind these for the stages that run on cores only; with them variants with `cores: true` are
            taken, without them the others.

    Raises:
        PlanError: no variant fits, a stage is missing or unknown, there are too few blocks, or nothing can run ahead.
    """
    meant = [variant for variant in trees if bool(variant.get("cores")) == bool(cores)]
    if not meant:
        raise PlanError(
            f"plan {name} has no tree with `cores: true`, but simulators are on the cores {list(cores)} beside "
            "accelerators (cluster.cpu_devices): add one, or use plan=auto"
            if cores
            else f"plan {name} is for cores beside accelerators: set cluster.cpu_devices, or use another plan"
        )
    ranges = [(*_range(variant, name), variant) for variant in meant]
    fitting = [(least, variant) for least, most, variant in ranges if least <= num_devices <= most]
    if not fitting:
        least = min(least for least, _, _ in ranges)
        if num_devices > least:
            raise PlanError(
                f"plan {name} was made for {least} devices, but cluster.num_devices is {num_devices}: set "
                f"cluster.num_devices={least}, or use plan=auto"
            )
        raise PlanError(
            f"plan {name} needs at least {least} devices, but cluster.num_devices is {num_devices}: "
            "use plan=collocated or a larger cluster"
        )
    _, variant = max(fitting, key=lambda entry: entry[0])
    tree = without_absent(variant["tree"], workflow)
    parsed = _parse(tree, (num_devices, cores), f"plan.{name}")
    plan = Plan(name, num_devices + len(cores), parsed, _staleness(variant, name))
    require_runnable(name, plan.tree, workflow)
    require_staleness(name, plan.staleness, workflow)
    _require_places(plan, workflow, cores)
    return plan
