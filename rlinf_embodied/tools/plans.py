"""Finds the profiles, clusters and plans that planning commands name.

The functions raise ConfigError if nothing has the name, or a file breaks a rule of its format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup, local_cluster
from rlinf_embodied.compose import CONFIG_DIR, FILE_SUFFIXES, explained, keys, read_mapping, stored_variant
from rlinf_embodied.config import ProfiledConfig
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, load_profile

_LARGEST = 1e30  # larger than any number of bytes or rate; products of such numbers are finite


@dataclass(kw_only=True, slots=True)
class ClusterFile:
    """The content of a file that describes a cluster."""

    name: str
    nodes: list[NodeGroup]
    links: Links = field(default_factory=Links)


def find_profile(config: ProfiledConfig) -> Profile:
    """Returns the profile that a planning command names, with its `num_items` replaced if given."""
    profile = load_profile(find_file("profile", config.profile, "profiles", (".json",)))
    if config.num_items and profile.workload:
        return replace(profile, workload=replace(profile.workload, num_items=config.num_items))
    return profile


def find_cluster(name: str) -> Cluster:
    """Returns this machine (`local`), or the cluster of a file under configs/described_clusters or at a path."""
    if name == "local":
        return local_cluster(None)
    path = find_file("cluster", name, "described_clusters", (".yaml", ".yml"))
    return described_cluster(read_mapping(path), str(path))


def find_file(key: str, name: str, folder: str, suffixes: Sequence[str]) -> Path:
    """Returns the file of a name: a file of a folder below configs/, or a path with one of the suffixes."""
    path = Path(name).expanduser()
    if path.suffix in suffixes:
        return path
    known = {file.stem: file for file in sorted((CONFIG_DIR / folder).iterdir())}
    if name not in known:
        raise ConfigError(
            f"{key} is {name!r}, but it must be one of configs/{folder} ({', '.join(known)}), or a path to a "
            f"{suffixes[0]} file: correct it"
        )
    return known[name]


def described_cluster(data: Mapping[str, object], path: str) -> Cluster:
    """Returns the cluster described by the content of a file.

    Raises:
        ConfigError: a key is missing or unknown, or a number is not positive.
    """
    schema = OmegaConf.structured(ClusterFile)
    OmegaConf.set_readonly(schema.links, False)  # a frozen dataclass would stay read-only
    try:
        described = OmegaConf.to_object(OmegaConf.merge(schema, data))
    except (OmegaConfBaseException, OverflowError) as error:
        raise explained(error, keys(ClusterFile), path) from error
    assert isinstance(described, ClusterFile)
    groups = described.nodes
    if not groups:
        raise ConfigError(f"{path}.nodes is [], but a cluster has at least one group of nodes: describe it")
    for key, part in ((f"{path}.links", described.links), *((f"{path}.nodes[{i}]", g) for i, g in enumerate(groups))):
        for name, value in ((entry.name, getattr(part, entry.name)) for entry in fields(part)):
            if name not in ("kind", "beside") and not 0 < value <= _LARGEST:
                raise ConfigError(f"{key}.{name} is {value!r}, but it is a positive number: correct the file")
    for i, group in enumerate(groups):
        earlier = {k: g.num_nodes for k, g in enumerate(groups[:i]) if g.beside is None}
        if group.beside is not None and earlier.get(group.beside) != group.num_nodes:
            raise ConfigError(
                f"{path}.nodes[{i}].beside is {group.beside!r}, but it is the index of an earlier group with as many "
                "nodes and without `beside`: correct the file"
            )
    return Cluster(
        name=described.name,
        kind="+".join(group.kind for group in groups),
        num_devices=sum(group.num_devices for group in groups),
        num_cores=sum(group.num_nodes * group.cores_per_node for group in groups),
        memory_bytes=int(min(group.memory_bytes for group in groups)),
        description=", ".join(f"{g.num_nodes} nodes x {g.devices_per_node} {g.kind}" for g in groups),
        groups=tuple(groups),
        links=described.links,
        emulated=True,
    )


def find_named_plans(text: str, pricer: Pricer, num_ranked: int, max_staleness: int = 0) -> list[Plan]:
    """Returns the plans that a text names, best first.

    Args:
        text: auto (the best plan), all (the best plans, and the best of every kind), a kind (its best plan), a preset
            under configs/plan, or a path to a plan file.
        pricer: predicts the seconds of plans.
        num_ranked: minimum number of plans of `all`.
        max_staleness: the largest staleness of searched plans.

    Raises:
        ConfigError, PlanError: the plan does not exist, or does not fit the workflow or the cluster.
    """
    if text in ("all", "auto", *Kind):
        ranking = rank(pricer, num_ranked, max_staleness=max_staleness)
        ranked = [entry for entry in ranking.plans if text in ("all", "auto", entry.kind)]
        if not ranked:
            raise PlanError(f"plan is {text!r}, but there is none ({'; '.join(ranking.remarks)}): use auto")
        prefix = "" if text == "all" else f"{text} "
        return [replace(entry.plan, name=f"{prefix}{entry.label}") for entry in ranked[: None if text == "all" else 1]]
    path = find_file("plan", text, "plan", FILE_SUFFIXES)
    data = read_mapping(path)
    variants = data.get("variants") or [stored_variant(data)]
    if not isinstance(variants, list):
        raise ConfigError(f"{path}.variants is {variants!r}, but it is a list: see configs/plan/collocated.yaml")
    return [resolve(str(data.get("name") or path.stem), variants, pricer.cluster, pricer.workflow)]
