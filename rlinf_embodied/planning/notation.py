"""Plans as text: written by people and in files, printed, and resolved for a cluster.

    plan      = item { " > " item } [ "; exclusive " sets ] [ "; staleness " number ]
    item      = group { " | " group } [ " in " number " chunks" | " in chunks" | " in " number " shards" ]
    group     = stage { "+" stage } " on " devices [ " (" blocks ")" ]       stages on the same devices
    stage     = name [ "?" ]                                                 "?": only if the workflow has it
    devices   = "all" | "cores" | fraction ":" fraction | numbers            "0:1/2": the first half; "0-3,6"
    blocks    = count { ":" count }, count = number [ "x" number ]           of each device; "4x3": 4 devices with 3
    sets      = stage { "+" stage } " / " stage { "+" stage }                never in memory together with the other set

    env+policy on 0-1 > actor on 0-1                    all on two devices, one after the other
    env on 0 | policy on 1 in 2 shards > actor on 0-1   a loop whose sides are on different devices
    generation on 0-1 | reward+critic on 2-3 in 4 chunks > actor on 0-3; exclusive generation / actor

"in chunks" means the largest number that leaves each device a block of every chunk.  The two stages of a loop form a
separate item, before the other stages of the same text.  Other stages of an item without chunks run one after the
other.  A file holds the items as a list:

    {"name": "mine", "num_devices": 2, "items": ["env+policy on 0-1", "actor on 0-1"]}

or `variants`, a list of such mappings.  Of those whose min_devices and max_devices suit a cluster, the one with the
largest min_devices is used.  `cores: true` marks variants for clusters with both cores and accelerators.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import MAX_STALENESS
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.plan import Blocks, Devices, Item, Pairs, Place, Plan, leading, sorted_pairs
from rlinf_embodied.workflow.graph import Workflow

_ITEM = re.compile(r"(.+?)(?: in (?:(\d{1,9}) (chunks|shards)|(chunks)))?")
_GROUP = re.compile(r"(\S+(?:\s*\+\s*\S+)*) on ([^()]+?)(?: \(((?:\d{1,6}x)?\d{1,6}(?::(?:\d{1,6}x)?\d{1,6})*)\))?")
_FRACTION = r"(\d{1,9}(?:/[1-9]\d{0,8})?)"
_RANGE = re.compile(rf"{_FRACTION}:{_FRACTION}")
_NUMBERS = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")


def to_text(plan: Plan) -> str:
    """Returns a plan without its name, for example "env+policy on 0-1 > actor on 0-1"."""
    parts = [" > ".join(map(_item_text, plan.items))]
    parts += [f"exclusive {sets}" for sets in _exclusive_texts(plan.exclusive)]
    return "; ".join(parts + [f"staleness {plan.staleness}"] * bool(plan.staleness))


def to_dict(plan: Plan) -> dict[str, object]:
    """Returns the plan as JSON-ready data, the content of a plan.json."""
    data: dict[str, object] = {"name": plan.name, "num_devices": plan.num_devices}
    data["items"] = [_item_text(item) for item in plan.items]
    data |= {"exclusive": _exclusive_texts(plan.exclusive)} if plan.exclusive else {}
    return data | ({"staleness": plan.staleness} if plan.staleness else {})


def _item_text(item: Item) -> str:
    groups = itertools.groupby(item.places, key=lambda place: (place.devices, place.blocks))
    texts = [f"{'+'.join(p.stage for p in places)} on {place_text(*key)}" for key, places in groups]
    suffix = f" in {item.chunks} chunks" if item.chunks > 1 else f" in {item.shards} shards" if item.shards > 1 else ""
    return " | ".join(texts) + suffix


def place_text(devices: Devices, blocks: Blocks = ()) -> str:
    """Returns devices and their blocks: "0-3,6 (4x2:1)"."""
    runs = [
        [device for _, device in run]
        for _, run in itertools.groupby(enumerate(devices), key=lambda entry: entry[1] - entry[0])
    ]
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    if not blocks:
        return text
    counts = [(len(list(alike)), size) for size, alike in itertools.groupby(blocks)]
    sizes = [f"{n}x{size}" if n > 2 else ":".join([str(size)] * n) for n, size in counts]
    return f"{text} ({':'.join(sizes)})"


def _exclusive_texts(pairs: Pairs) -> list[str]:
    others: dict[str, list[str]] = {}
    for a, b in pairs:
        others.setdefault(a, []).append(b)
    return [f"{stage} / {'+'.join(excluded)}" for stage, excluded in others.items()]


@dataclass(frozen=True, slots=True)
class _Reader:
    workflow: Workflow
    num_devices: int  # number of devices to which `all` and fractions refer
    cores: Devices
    total: int  # number of all devices, which numbers may name

    def items(self, text: str, path: str) -> list[Item]:
        """Returns the items of a text: several if its stages neither stream nor form a loop."""
        match = _ITEM.fullmatch(text.strip())
        body, number, what, many = match.groups() if match else ("", None, None, None)
        places: list[Place] = []
        for group in body.split("|"):
            parts = _GROUP.fullmatch(group.strip())
            if parts is None:
                raise PlanError(
                    f"{path} is {text!r}, but it must read like 'env on 0 | policy on 1 in 2 shards', with blocks as "
                    "in 'actor on 0-3 (3x4:2)': correct the plan"
                )
            devices, blocks = self.devices(parts[2], path), list[int]()
            for times, _, size in (part.rpartition("x") for part in (parts[3] or "").split(":") if part):
                blocks += [int(size)] * int(times or 1)
            places += [Place(stage, devices, tuple(blocks)) for stage in self.names(parts[1])]
        if not places:
            return []
        sides = [place for place in places if self.workflow.loop_of(place.stage) is not None]
        if sides and len(sides) < len(places):  # a loop passes its blocks on when it ends: it is a separate item
            rest = [place for place in places if place not in sides]
            return [Item(tuple(sides)), *self._streaming(rest, number, what, many)]
        return self._streaming(places, number, what, many)

    def _streaming(self, places: list[Place], number: str | None, what: str | None, many: str | None) -> list[Item]:
        count = int(number or 1)
        if many:  # the largest number of chunks that leaves every device a block of each chunk
            min_size = max(len(leading(place, self.workflow).devices) for place in places)
            total = self.workflow.num_blocks
            count = max(k for k in range(1, total + 1) if total % k == 0 and (total // k >= min_size or k == 1))
        elif count == 1 and self.workflow.loop_of(places[0].stage) is None:
            return [Item((place,)) for place in places]
        return [Item(tuple(places), *((1, count) if what == "shards" else (count, 1)))]

    def names(self, text: str) -> list[str]:
        """Returns the stages of a text, without the optional ones that the workflow lacks."""
        names = [name.strip() for name in text.split("+")]
        return [
            n.removesuffix("?") for n in names if not n.endswith("?") or n.removesuffix("?") in self.workflow.stages
        ]

    def devices(self, text: str, path: str) -> Devices:
        """Returns device numbers for `all`, `cores`, "a/b:c/d" (fractions of the devices) or "0-3,6"."""
        fractions, numbers = _RANGE.fullmatch(text), list[int]()
        if text in ("all", "cores"):
            numbers = list(range(self.num_devices) if text == "all" else self.cores)
        elif fractions is not None:
            low, high = (int(Fraction(part) * self.num_devices) for part in fractions.groups())
            numbers = list(range(low, high))
        elif _NUMBERS.fullmatch(text):
            for first, _, last in (part.partition("-") for part in text.split(",")):
                numbers += range(int(first), min(int(last or first), self.total) + 1)
        if not numbers or max(numbers) >= self.total:
            raise PlanError(
                f"{path} has the devices {text!r}, but they are `all`, `cores`, a range like '0:1/2' or numbers like "
                f"'0-3,6' of the devices 0-{self.total - 1} of the cluster: correct the plan or set cluster.num_devices"
            )
        return tuple(numbers)

    def pairs(self, texts: Sequence[str]) -> Pairs:
        """Returns the exclusive pairs of texts like 'generation / actor+critic'."""
        sides = ([self.names(part) for part in text.split("/")] for text in texts)
        return sorted_pairs(
            pair for sets in sides for a, b in itertools.combinations(sets, 2) for pair in itertools.product(a, b)
        )


def resolve(name: str, variants: Sequence[Mapping[str, object]], cluster: Cluster | int, workflow: Workflow) -> Plan:
    """Returns the plan for a cluster: the variant for its number of devices, checked against the workflow.

    Args:
        name: for messages and plan.json.
        variants: mappings `{min_devices, max_devices, cores, items, exclusive, staleness}`.
        cluster: the devices; `all` and fractions refer to those that compute.  A number means as many identical
            devices.  If the cluster has cores next to accelerators, and the workflow has stages that run on cores only,
            variants with `cores: true` are preferred.  A variant for exactly its number of devices takes precedence,
            whatever their kinds.
        workflow: the workflow that the plan runs.

    Raises:
        PlanError: no variant fits, a stage is missing or unknown, there are too few blocks, or nothing can run ahead.
    """
    num_devices, cores, total = (
        (cluster, (), cluster)
        if isinstance(cluster, int)
        else (cluster.num_computing, cluster.cores_beside if workflow.of_cores() else (), cluster.num_devices)
    )
    variant = _chosen(name, variants, num_devices, bool(cores), total)
    texts, staleness = dict[str, Sequence[str]](), variant.get("staleness", 0)
    for key, value in (("items", variant.get("items")), ("exclusive", variant.get("exclusive") or [])):
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            rule = "a list of texts like 'actor on all', exclusive like 'env+policy / actor'"
            raise PlanError(f"plan.{name}.{key} is {value!r}, but it is {rule}: correct the plan")
        texts[key] = value
    if isinstance(staleness, bool) or not isinstance(staleness, int) or not 0 <= staleness <= MAX_STALENESS:
        rule = f"a whole number of iterations, 0 to {MAX_STALENESS}"
        raise PlanError(f"plan.{name}.staleness is {staleness!r}, but it is {rule}: correct it, or leave it out for 0")
    reader = _Reader(workflow, num_devices, cores, total)
    items = [item for i, text in enumerate(texts["items"]) for item in reader.items(text, f"plan.{name}.items[{i}]")]
    plan = Plan(name, total, tuple(items), reader.pairs(texts["exclusive"]), staleness)
    check(plan, workflow)
    for place in plan.places().values() if cores else ():
        if set(place.devices) & set(cores) != set(place.devices if place.stage in workflow.of_cores() else ()):
            raise PlanError(
                f"plan {name} has {place.stage} on the devices {list(place.devices)}, but with cluster.cpu_devices "
                f"{list(workflow.of_cores())} run on cores, {list(cores)}, and other stages do not: correct the plan"
            )
    return plan


def _chosen(
    name: str, variants: Sequence[Mapping[str, object]], num_devices: int, on_cores: bool, total: int
) -> Mapping[str, object]:
    ranges = []
    for variant in variants:
        least, most = variant.get("min_devices", 1), variant.get("max_devices", float("inf"))
        if not isinstance(least, int) or not isinstance(most, (int, float)):
            rule = "`min_devices` is a whole number"
            raise PlanError(f"plan {name} has the variant {dict(variant)!r}, but {rule}: correct the plan")
        ranges.append((least, most, variant))
    exact = [variant for least, most, variant in ranges if least == most == total]
    if exact:
        return exact[0]
    suitable = [entry for entry in ranges if bool(entry[2].get("cores")) == on_cores] or ranges * on_cores
    if not suitable:
        rule = "needs CPU cores next to accelerators"
        raise PlanError(f"plan {name} {rule}: set cluster.cpu_devices, or use another plan")
    fitting = [entry for entry in suitable if entry[0] <= num_devices <= entry[1]]
    if not fitting:
        least, most, _ = min(suitable, key=lambda entry: entry[:2])
        raise PlanError(
            f"plan {name} needs {'' if least == most else 'at least '}{least:g} devices, but cluster.num_devices is "
            f"{num_devices}: use plan=collocated, plan=auto, or another cluster"
        )
    return max(fitting, key=lambda entry: entry[0])[2]
