"""Trains twice, undisturbed and disturbed, and says what each fault cost and whether the weights are equal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf_embodied.chaos.faults import MISSING, Chaos, schedule
from rlinf_embodied.chaos.harm import two_nodes
from rlinf_embodied.chaos.session import ChaosSession
from rlinf_embodied.chaos.settings import Options, configure
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.telemetry.tables import text_table
from rlinf_embodied.training.trainer import Trainer


def disturbed(config: TrainConfig | MathConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None) -> int:
    """Runs a training in this process, to which the faults come; returns the trainer's exit code."""
    job = EmbodiedJob(config) if isinstance(config, TrainConfig) else ReasoningJob(config)
    return Trainer(job, sessions=lambda cluster: ChaosSession(cluster, chaos, end_node)).run()


def train(config: TrainConfig | MathConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None) -> str:
    """Runs a training to its end and returns the digest of its weights."""
    code = disturbed(config, chaos, end_node)
    assert code == 0, f"a run that nobody interrupts ended with {code}"
    return json.loads((Path(str(config.run.dir)) / "summary.json").read_text())["weights_sha256"]


def report(chaos: Chaos, folder: Path) -> str:
    """Returns what each fault cost: a table, one by kind, and the median and the worst case."""
    path = folder / "recoveries.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows, costs, kinds = [], [], dict[str, list[tuple[float, float]]]()
    for number, fault in enumerate(chaos.come):
        until = chaos.come[number + 1].at if number + 1 < len(chaos.come) else float("inf")
        own = [record for record in records if fault.at <= record["at"] < until]
        lost, restored = (sum(record[key] for record in own) for key in ("lost_s", "recovery_s"))
        seen = min((record["at"] for record in own), default=fault.at) - fault.at
        costs.append(lost + restored)
        kinds.setdefault(fault.kind, []).append((seen, lost + restored))
        again = ", ".join(record["work"] for record in own) or "nothing"
        seconds = {"seen": seen, "work lost": lost, "recovery": restored}
        row = {"fault": fault.kind, "phase": fault.phase, "met": fault.met, "done again": again}
        rows.append(row | {f"{key} s": f"{value:.1f}" for key, value in seconds.items()})
    last = f"{len(chaos.come)} of {len(chaos.faults)} faults came, {len(records)} recoveries"
    if costs:
        last += f"; seconds lost per fault: median {statistics.median(costs):.1f}, worst {max(costs):.1f}"
    by_kind = [
        {"fault": kind, "number": str(len(several))}
        | {f"{name} s": _middle_and_worst([pair[k] for pair in several]) for k, name in enumerate(("seen", "lost"))}
        for kind, several in sorted(kinds.items())
    ]
    return "\n".join([text_table(rows, "faults:"), text_table(by_kind, "by kind:"), last] if rows else [last])


def _middle_and_worst(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"


def compare(own: Options, overrides: Sequence[str], root: Path) -> int:
    """Makes both runs, prints what came of them, and returns the exit code."""
    undisturbed = configure(own, overrides, root / "straight")
    straight = train(undisturbed, Chaos([]))
    chaos = Chaos(schedule(own.faults, own.seed, MISSING.get(undisturbed.plan.name, ("profile",)), own.nodes))
    if own.nodes > 1:
        with two_nodes() as (address, end_node):
            there = [*overrides, "cluster=ray", f"cluster.address={address}"]
            digest = train(configure(own, there, root / "chaos"), chaos, end_node)
    else:
        digest = train(configure(own, overrides, root / "chaos"), chaos)
    print(report(chaos, root / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {digest}: {'equal' if straight == digest else 'NOT EQUAL'}")
    return 0 if straight == digest and len(chaos.come) == own.faults else 1
