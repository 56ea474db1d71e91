"""What planning commands are given, by name or path, and what they print and write: ranked plans, and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster, local_cluster
from rlinf_embodied.compose import CONFIG_DIR, FILE_SUFFIXES, choices, read_mapping, stored_variant
from rlinf_embodied.config import ProfiledConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.explain import LONG_COLUMNS, Ranking, best_of, rank, rows
from rlinf_embodied.planning.notation import resolve_on, to_dict
from rlinf_embodied.planning.plan import Kind, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, load_profile
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.telemetry.plots import gantt
from rlinf_embodied.telemetry.tables import described_table, markdown_table, terminal_width, text_table
from rlinf_embodied.telemetry.trace import write_trace
from rlinf_embodied.tools.described_cluster import described_cluster

DRAWN_DEVICES = 16  # a chart with more rows cannot be read


def find_profile(config: ProfiledConfig) -> Profile:
    """Returns the profile that a planning command names, with its `num_items` replaced if given.

    Raises:
        ConfigError: there is none of that name, or it breaks a rule of the format.
    """
    path = Path(config.profile).expanduser()
    if path.suffix != ".json":
        names = sorted(file.stem for file in (CONFIG_DIR / "profiles").glob("*.json"))
        if config.profile not in names:
            raise ConfigError(
                f"profile is {config.profile!r}, but it must be one of configs/profiles ({', '.join(names)}), or a "
                "path to a .json file: correct it"
            )
        path = CONFIG_DIR / "profiles" / f"{config.profile}.json"
    profile = load_profile(path)
    if config.num_items and profile.workload:
        return replace(profile, workload=replace(profile.workload, num_items=config.num_items))
    return profile


def find_model(name: str) -> Path:
    """Returns the config.json of a model: one under configs/models, a path to one, or to a folder that has one.

    Raises:
        ConfigError: there is none of that name.
    """
    path = Path(name).expanduser()
    known = {file.stem: file for file in sorted((CONFIG_DIR / "models").glob("*.json"))}
    found = known.get(name) or (path / "config.json" if path.is_dir() else path)
    if not found.is_file():
        raise ConfigError(
            f"model is {name!r}, but it must be one of configs/models ({', '.join(known)}), or a path to a config.json "
            "or to its folder: correct it"
        )
    return found


def find_cluster(name: str) -> Cluster:
    """Returns this machine (`local`), or the cluster that a file under configs/cluster or at a path describes.

    Raises:
        ConfigError: there is none of that name, or its file breaks a rule.
    """
    if name == "local":
        return local_cluster(None)
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        known = [choice for choice in (name, f"emulated_{name}") if choice in choices("cluster")]
        if not known:
            raise ConfigError(
                f"cluster is {name!r}, but it must be local, one of configs/cluster ({', '.join(choices('cluster'))}) "
                "or a path to a .yaml file: correct it"
            )
        path = CONFIG_DIR / "cluster" / f"{known[0]}.yaml"
    return described_cluster(read_mapping(path), str(path))


def find_named_plans(text: str, pricer: Pricer, num_ranked: int, max_staleness: int = 0) -> list[Plan]:
    """Returns the plans that a text names, the best first.

    Args:
        text: auto (the best one), all (the best ones, those of every kind among them), a kind (collocated,
            disaggregated or hybrid), a preset under configs/plan, or a path to a plan file.
        pricer: what is planned.
        num_ranked: how many `all` means at least.
        max_staleness: the largest staleness of `auto` and `all`.

    Raises:
        ConfigError: there is no such plan.
        PlanError: no plan of that kind is possible, or the file's plan does not suit the workflow or the cluster.
    """
    if text == "all":
        ranking = rank(pricer, num_ranked, max_staleness=max_staleness)
        return [replace(entry.plan, name=entry.label) for entry in ranking.plans]
    if text == "auto" or text in list(Kind):
        best = rank(pricer, max_staleness=max_staleness).best if text == "auto" else best_of(Kind(text), pricer)
        return [replace(best.plan, name=f"{text} {best.label}")]
    path = Path(text).expanduser()
    if text in choices("plan"):
        path = CONFIG_DIR / "plan" / f"{text}.yaml"
    elif path.suffix not in FILE_SUFFIXES:
        names = ", ".join(dict.fromkeys(["auto", "all", *Kind, *choices("plan")]))
        raise ConfigError(f"plan is {text!r}, but it must be {names} or a path to a plan file: correct it")
    data = read_mapping(path)
    variants = data.get("variants") or [stored_variant(data)]
    if not isinstance(variants, list):
        raise ConfigError(f"{path}.variants is {variants!r}, but it is a list: see configs/plan/collocated.yaml")
    return [resolve_on(pricer.cluster, str(data.get("name") or path.stem), variants, pricer.workflow)]


def show_plans(ranking: Ranking, pricer: Pricer) -> None:
    """Prints plans from the best one on, and why kinds have none."""
    cluster = pricer.cluster
    title = (
        f"{pricer.workflow.name} on {cluster.name} ({cluster.description}), profile {pricer.profile.name}: predicted"
    )
    print(described_table(rows(ranking.plans), LONG_COLUMNS, title, terminal_width()))
    print("a > b: a's calls before b's; a | b: on different devices, streaming; a+b: on the same devices")
    for remark in ranking.remarks():
        print(remark)


def write_plans(folder: Path, ranking: Ranking, pricer: Pricer) -> None:
    """Writes plan.json, whose items are the best plan's, and its simulated iteration as plan.png and trace.json."""
    folder.mkdir(parents=True, exist_ok=True)
    best = ranking.best
    described = {
        **to_dict(best.plan),
        "predicted_s_per_iteration": best.iteration_s,
        "profile": pricer.profile.name,
        "cluster": pricer.cluster.name,
        "ranked": rows(ranking.plans),
        "impossible": {str(kind): reason for kind, reason in ranking.impossible.items()},
    }
    (folder / "plan.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    spans = simulate(best.plan, pricer, traced=True).spans
    if pricer.cluster.num_devices > DRAWN_DEVICES:  # a stage's first device stands for all of them
        first = {stage: place.devices[0] for stage, place in best.plan.places().items()}
        spans = [span for span in spans if span.worker == first[span.stage]]
    write_trace(folder / "trace.json", spans)
    title = f"{pricer.workflow.name} on {pricer.cluster.name}: {best.label}, predicted"
    gantt({title: spans}).savefig(folder / "plan.png", dpi=120)


def write_tables(folder: Path, name: str, tables: Mapping[str, list[dict[str, str]]]) -> None:
    """Prints tables by title, and writes them as <name>.json and <name>.md."""
    for title, table in tables.items():
        print(text_table(table, title), end="\n\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    pages = [
        f"{title}\n\n{markdown_table(list(table[0]), [list(row.values()) for row in table])}"
        for title, table in tables.items()
    ]
    (folder / f"{name}.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
