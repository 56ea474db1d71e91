"""What planning commands give: ranked plans as a table and files, and the memory of a model's training and rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlinf_embodied.config import MemoryConfig
from rlinf_embodied.planning.explain import LONG_COLUMNS, Ranking, rows
from rlinf_embodied.planning.notation import to_dict
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.telemetry.plots import gantt
from rlinf_embodied.telemetry.tables import described_table, markdown_table, terminal_width, text_table
from rlinf_embodied.telemetry.trace import write_trace
from rlinf_embodied.tools.memory import PolicyShape
from rlinf_embodied.tools.memory_plan import GB, fit_rows, fits, term_rows

DRAWN_DEVICES = 16  # a chart with more rows cannot be read


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


def memory_tables(model: str, shapes: dict[str, PolicyShape], memory: MemoryConfig) -> dict[str, list[dict[str, str]]]:
    """Returns, by title, what a model holds in bytes under each way to train it, and where that fits."""
    arranged = {method: fits(shape, memory.num_devices, memory.rollout_rows) for method, shape in shapes.items()}
    room = memory.room_bytes
    found = [row for method, fit in arranged.items() for row in fit_rows(method, fit, memory.microbatch, room)]
    return {
        f"{model}: bytes, passes in {memory.precision.value}": term_rows(shapes),
        f"GB of the fullest device, of {room / GB:g}: passes of {memory.microbatch} rows, rollouts of "
        f"{memory.rollout_rows} rows": found,
    }


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
