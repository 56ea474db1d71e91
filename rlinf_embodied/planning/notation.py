"""Plans as text, which people and files write: read, printed, and resolved for a cluster.

    plan      = item { " > " item } [ "; exclusive " sets ] [ "; staleness " number ]
    item      = group { " | " group } [ " in " number " chunks" | " in chunks" | " in " number " shards" ]
    group     = stage { "+" stage } " on " devices [ " (" blocks ")" ]       stages on the same devices
    stage     = name [ "?" ]                                                 "?": only if the workflow has it
    devices   = "all" | "cores" | fraction ":" fraction | numbers            "0:1/2": the first half; "0-3,6"
    blocks    = count { ":" count }, count = number [ "x" number ]           of each device; "4x3": 4 devices with 3
    sets      = stage { "+" stage } " / " stage { "+" stage } { " / " ... }  never in memory together with another set

    env+policy on 0-1 > actor on 0-1                    all on two devices, one after the other
    env on 0 | policy on 1 in 2 shards > actor on 0-1   a loop whose sides are on different devices
    generation on 0-1 | reward+critic on 2-3 in 4 chunks > actor on 0-3; exclusive generation / actor

"in chunks" means as many as leave a block for each device.  Several stages in an item without chunks run one after the
other, unless they are the sides of a loop.  A file holds the items as a list:

    {"name": "mine", "num_devices": 2, "items": ["env+policy on 0-1", "actor on 0-1"]}

or `variants`, a list of such mappings; of those whose min_devices and max_devices suit a cluster the one with the
largest min_devices is taken.  `cores: true` marks those for clusters with both cores and accelerators.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeGuard

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import MAX_STALENESS
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.plan import Blocks, Devices, Item, Pairs, Place, Plan, sorted_pairs
from rlinf_embodied.workflow.graph import Workflow

_ITEM = re.compile(r"(.+?)(?: in (?:(\d{1,9}) (chunks|shards)|(chunks)))?")
_GROUP = re.compile(r"(\S+(?:\s*\+\s*\S+)*) on ([^()]+?)(?: \(([\dx:]+)\))?")
_FRACTION = r"(\d{1,9}(?:/0{0,8}[1-9]\d{0,8}|\.\d{1,9})?)"
_RANGE = re.compile(rf"{_FRACTION}:{_FRACTION}")
_NUMBERS = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")
_MOST = 1 << 20  # devices or blocks that a text may spell


# --------------------------------------------------------------------------------------------------------------- print
def to_text(plan: Plan) -> str:
    """Returns a plan without its name, for example "env+policy on 0-1 > actor on 0-1"."""
    parts = [" > ".join(map(item_text, plan.items))]
    parts += [f"exclusive {sets}" for sets in exclusive_texts(plan.exclusive)]
    return "; ".join(parts + [f"staleness {plan.staleness}"] * bool(plan.staleness))


def to_dict(plan: Plan) -> dict[str, object]:
    """Returns the plan as JSON-ready data: what plan.json holds and a plan file may."""
    found: dict[str, object] = {"name": plan.name, "num_devices": plan.num_devices}
    found["items"] = [item_text(item) for item in plan.items]
    found |= {"exclusive": exclusive_texts(plan.exclusive)} if plan.exclusive else {}
    return found | ({"staleness": plan.staleness} if plan.staleness else {})


def item_text(item: Item) -> str:
    """Returns an item as text."""
    groups = itertools.groupby(item.places, key=lambda place: (place.devices, place.blocks))
    texts = [f"{'+'.join(p.stage for p in places)} on {place_text(*where)}" for where, places in groups]
    suffix = f" in {item.chunks} chunks" if item.chunks > 1 else f" in {item.shards} shards" if item.shards > 1 else ""
    return " | ".join(texts) + suffix


def place_text(devices: Devices, blocks: Blocks = ()) -> str:
    """Returns devices and their blocks: "0-3,6 (4x2:1)"."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    if not blocks:
        return text
    counts = [(len(list(alike)), size) for size, alike in itertools.groupby(blocks)]
    sizes = [f"{n}x{size}" if n > 2 else ":".join([str(size)] * n) for n, size in counts]
    return f"{text} ({':'.join(sizes)})"


def exclusive_texts(pairs: Pairs) -> list[str]:
    """Returns the pairs as sets, of which each excludes all others, if they are such; else pair by pair."""
    others: dict[str, set[str]] = {}
    for a, b in pairs:
        others.setdefault(a, set()).add(b)
        others.setdefault(b, set()).add(a)
    sets: dict[frozenset[str], list[str]] = {}
    for stage, apart in others.items():
        sets.setdefault(frozenset(apart), []).append(stage)
    whole = all(apart == set(others) - set(stages) for apart, stages in sets.items())
    if whole and pairs:
        return [" / ".join("+".join(stages) for stages in sets.values())]
    return [f"{a} / {b}" for a, b in pairs]


# ---------------------------------------------------------------------------------------------------------------- read
def parse(text: str, num_devices: int, workflow: Workflow, name: str = "plan", cores: Devices = ()) -> Plan:
    """Returns the plan that a text describes, checked against the workflow.

    Raises:
        PlanError: it is no plan, or one that cannot run.
    """
    items, *options = (part.strip() for part in text.split(";"))
    data: dict[str, object] = {"items": items.split(" > ")}
    for option in options:
        key, _, value = option.partition(" ")
        if key not in ("exclusive", "staleness"):
            raise PlanError(f"plan.{name} has {option!r}, but after `;` comes `exclusive` or `staleness`: correct it")
        if key == "exclusive":
            data.setdefault(key, []).append(value)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            data[key] = int(value) if value.isdecimal() else value
    return from_dict(name, data, num_devices, workflow, cores)


def from_dict(name: str, data: Mapping[str, object], num_devices: int, workflow: Workflow, cores: Devices = ()) -> Plan:
    """Returns the plan of a mapping with `items` and perhaps `exclusive` and `staleness`, checked.

    Raises:
        PlanError: see `parse`.
    """
    texts, staleness = data.get("items"), data.get("staleness", 0)
    if not _is_texts(texts) or not texts:
        raise PlanError(
            f"plan.{name}.items is {texts!r}, but it is a list of texts like 'actor on all': correct the plan"
        )
    if isinstance(staleness, bool) or not isinstance(staleness, int) or not 0 <= staleness <= MAX_STALENESS:
        raise PlanError(
            f"plan.{name}.staleness is {staleness!r}, but it is a whole number of iterations, 0 to {MAX_STALENESS}: "
            "correct the plan, or leave it out for 0"
        )
    items = [
        item
        for i, text in enumerate(texts)
        for item in _items(text, f"plan.{name}.items[{i}]", num_devices, workflow, cores)
    ]
    pairs = _pairs(data.get("exclusive", []), f"plan.{name}.exclusive", workflow)
    plan = Plan(name, num_devices + len(cores), tuple(items), pairs, staleness)
    check(plan, workflow)
    return plan


def _is_texts(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _items(text: str, path: str, num_devices: int, workflow: Workflow, cores: Devices) -> list[Item]:
    match = _ITEM.fullmatch(text.strip())
    body, number, what, many = match.groups() if match else ("", None, None, None)
    places: list[Place] = []
    for group in body.split("|"):
        found = _GROUP.fullmatch(group.strip())
        if found is None:
            raise PlanError(
                f"{path} is {text!r}, but it reads like 'env on 0 | policy on 1 in 2 shards': correct the plan"
            )
        stages, where, blocks = found.groups()
        devices = parse_devices(where, num_devices, path, cores)
        places += [Place(stage, devices, _blocks(blocks, path)) for stage in _names(stages, workflow)]
    loop = workflow.loop_of(places[0].stage) if places and places[0].stage in workflow.stages else None
    if many:
        return [Item(tuple(places), _most_chunks(places, workflow))] if places else []
    if loop is None and len(places) > 1 and int(number or 1) == 1:
        return [Item((place,)) for place in places]
    if not places:
        return []
    count = int(number or 1)
    return [Item(tuple(places), count if what == "chunks" else 1, count if what == "shards" else 1)]


def _names(text: str, workflow: Workflow) -> list[str]:
    """Returns the stages of a text, without the optional ones that the workflow lacks."""
    names = [name.strip() for name in text.split("+")]
    return [n.removesuffix("?") for n in names if not n.endswith("?") or n.removesuffix("?") in workflow.stages]


def _most_chunks(places: Sequence[Place], workflow: Workflow) -> int:
    """Returns the largest number of chunks in which every device has a block of each."""
    least, blocks = max(len(place.devices) for place in places), workflow.num_blocks
    return max(k for k in range(1, blocks + 1) if blocks % k == 0 and (blocks // k >= least or k == 1))


def _blocks(text: str | None, path: str) -> Blocks:
    found: list[int] = []
    for part in (text or "").split(":") if text else ():
        times, _, size = part.rpartition("x")
        if not size.isdecimal() or not (times or "1").isdecimal() or len(times) + len(size) > 12:
            raise PlanError(f"{path} has the blocks ({text}), but they read like (4:4:2) or (3x4:2): correct the plan")
        found += [int(size)] * min(int(times or 1), _MOST)
    return tuple(found)


def parse_devices(text: str, num_devices: int, path: str, cores: Devices = ()) -> Devices:
    """Returns device numbers for `all`, `cores`, "a/b:c/d" (fractions of the devices) or "0-3,6".

    Raises:
        PlanError: not of that form, empty, or beyond the cluster.
    """
    if text in ("all", "cores"):
        devices = tuple(range(num_devices)) if text == "all" else cores
    elif _NUMBERS.fullmatch(text):
        ends = [part.split("-") for part in text.split(",")]
        if any(int(end[-1]) >= num_devices + len(cores) for end in ends):
            raise PlanError(
                f"{path} has the devices {text}, but the cluster has the devices 0-{num_devices + len(cores) - 1}: set "
                "cluster.num_devices or use a plan made for this cluster"
            )
        devices = tuple(device for end in ends for device in range(int(end[0]), int(end[-1]) + 1))
    else:
        devices = _range_of(text, num_devices, path)
    if not devices:
        raise PlanError(
            f"{path} has the devices {text!r}, which is none of {num_devices}: use a larger cluster or range"
        )
    return devices


def _range_of(text: str, num_devices: int, path: str) -> Devices:
    match = _RANGE.fullmatch(text)
    low, high = (Fraction(part) for part in match.groups()) if match else (Fraction(0), Fraction(2))
    if high > 1:
        raise PlanError(
            f"{path} has the devices {text!r}, but they are `all`, `cores`, a range like '0:1/2' or numbers like "
            "'0-3,6': correct the plan"
        )
    return tuple(range(int(low * num_devices), int(high * num_devices)))


def _pairs(texts: object, path: str, workflow: Workflow) -> Pairs:
    if not _is_texts(texts):
        raise PlanError(
            f"{path} is {texts!r}, but it is a list of texts like 'generation / actor+critic': correct the plan"
        )
    found: set[tuple[str, str]] = set()
    for text in texts:
        sets = [_names(part, workflow) for part in text.split("/")]
        found |= {pair for a, b in itertools.combinations(sets, 2) for pair in itertools.product(a, b)}
    return sorted_pairs(found)


# ------------------------------------------------------------------------------------------------------------- resolve
def resolve_on(cluster: Cluster, name: str, variants: Sequence[Mapping[str, object]], workflow: Workflow) -> Plan:
    """Returns a named plan for the devices of a cluster that compute; for all of them where it does not fit these.

    Raises:
        PlanError: see `resolve`.
    """
    cores = cluster.cores_beside if workflow.of_cores() else ()
    try:
        return resolve(name, variants, cluster.num_computing, workflow, cores)
    except PlanError as error:
        if cluster.num_devices == cluster.num_computing:
            raise
        try:
            plan = resolve(name, variants, cluster.num_devices, workflow)
        except PlanError:
            raise error from None
        _require_places(plan, workflow, cores)
        return plan


def resolve(
    name: str, variants: Sequence[Mapping[str, object]], num_devices: int, workflow: Workflow, cores: Devices = ()
) -> Plan:
    """Returns the plan for a cluster: the variant that the devices suffice for, checked against the workflow.

    Args:
        name: for messages and plan.json.
        variants: mappings `{min_devices, max_devices, cores, items, exclusive, staleness}`.
        num_devices: devices of the cluster that `all` and fractions mean.
        workflow: what the plan is for.
        cores: devices behind these for the stages that run on cores only; with them variants with `cores: true` are
            taken, without them the others.

    Raises:
        PlanError: no variant fits, a stage is missing or unknown, there are too few blocks, or nothing can run ahead.
    """
    meant = [variant for variant in variants if bool(variant.get("cores")) == bool(cores)]
    if not meant:
        raise PlanError(
            f"plan {name} has no variant with `cores: true`, but simulators are on the cores {list(cores)} beside "
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
    plan = from_dict(name, variant, num_devices, workflow, cores)
    _require_places(plan, workflow, cores)
    return plan


def _range(variant: Mapping[str, object], name: str) -> tuple[int, float]:
    """Returns for how many devices a variant of a plan is, at least and at most."""
    least, most = variant.get("min_devices", 1), variant.get("max_devices", float("inf"))
    if not isinstance(least, int) or not isinstance(most, (int, float)) or variant.get("items") is None:
        raise PlanError(
            f"plan {name} has the variant {dict(variant)!r}, but a variant has `items`, and `min_devices` is a whole "
            "number: correct the plan"
        )
    return least, most


def _require_places(plan: Plan, workflow: Workflow, cores: Devices) -> None:
    """Checks that what runs on cores only is on `cores`, and nothing else is."""
    for stage, place in plan.places().items() if cores else ():
        on_cores, only = set(place.devices) & set(cores), stage in workflow.of_cores()
        if only and on_cores != set(place.devices):
            raise PlanError(
                f"plan {plan.name} has {stage} on the devices {list(place.devices)}, but with cluster.cpu_devices it "
                f"runs on cores, which are {list(cores)}: give it `cores`, or leave cluster.cpu_devices out"
            )
        if on_cores and not only:
            raise PlanError(
                f"plan {plan.name} has {stage} on the devices {list(place.devices)}, of which {sorted(on_cores)} are "
                "cores for simulators (cluster.cpu_devices): give it accelerators"
            )
