"""Faults on purpose: a training runs twice, undisturbed and with faults, and the weights are compared.

A schedule drawn from a seed says which fault meets whom in which phase; the next one comes when the run has recovered
from the one before (disturbances.py).  Nothing that computes is imported before a process is pinned.

| kind       | what happens                                                                                    |
|------------|-------------------------------------------------------------------------------------------------|
| SIGKILL    | the worker's process ends; so it does when memory runs out                                      |
| SIGSTOP    | it stands still                                                                                 |
| exception  | the call raises                                                                                 |
| full disk  | the process cannot write to files for a while: its checkpoint is written later                  |
| full store | objects fill Ray's store for a while: it has to write others to the disk; nothing is to be lost |
| lost node  | all processes of a node end                                                                     |
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.command_line import pin
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.tables import text_table

STORE_BYTES = 128 << 20  # of each node
SMALL = {
    "embodied": (
        *("env=point_reach", "env.num_envs=16", "env.block_size=4", "env.obs_size=16", "env.chunk=4", "env.horizon=12"),
        *(
            "env.chunks_per_rollout=4",
            "env.carry_over=true",
            "policy.options.hidden_size=32",
            "policy.options.num_layers=1",
        ),
        *(
            "policy.options.num_heads=2",
            "policy.options.stem_width=16",
            "policy.options.keypoints=4",
            "policy.options.num_bins=9",
        ),
        *("policy.options.critic_hidden_size=16", "policy.options.instruction_length=4", "algorithm.epochs=2"),
        *("algorithm.num_minibatches=2", "algorithm.value_epochs=2", "algorithm.lr=1e-3", "algorithm.target_kl=null"),
        *("warm_start.num_demos=32", "warm_start.epochs=1", "warm_start.head_epochs=16"),
        *("warm_start.head_batch_size=16", "warm_start.head_lr=5e-3", "eval.num_envs=4", "eval.record_video=false"),
        *("eval.num_episodes=4", "eval.every=1"),
    ),
    "reasoning": (
        *("data.level=sum1-2-9", "policy.hidden_size=32", "policy.num_layers=1", "policy.num_heads=2"),
        *("policy.intermediate_size=64", "policy.context_length=40", "generation.max_new_tokens=20"),
        *("generation.rows_per_block=8", "generation.rows_per_batch=16", "generation.max_num_seqs=16"),
        *("algorithm.prompts_per_iteration=8", "algorithm.group_size=4", "algorithm.lr=1e-3"),
        *("algorithm.tokens_per_microbatch=256", "warm_start.steps=240", "warm_start.chain_of_thought_share=0.2"),
        *("warm_start.num_examples=1024", "warm_start.lr=1e-2", "eval.num_problems=16", "eval.num_samples=1"),
        *("eval.problems_per_block=8", "eval.every=1"),
    ),
}
_COMMON = (
    *("plan=disaggregated", "cluster=local", "cluster.num_devices=2", "cluster.hang_after_s=10"),
    *("checkpoint.every=1", "recovery.max_restarts=1000", "recovery.snapshot_share=1", "run.seed=3"),
    f"cluster.object_store_bytes={STORE_BYTES}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the comparison."""

    workflow: str = "embodied"
    faults: int = 20
    seed: int = 7
    nodes: int = 1


def configure(own: Options, overrides: Sequence[str], folder: Path) -> TrainConfig | MathConfig:
    """Returns the config of a run: small, unless overridden, and with a separate cache.

    Raises:
        ConfigError: there is no such workflow, or an override is wrong.
    """
    if own.workflow not in SMALL:
        raise ConfigError(f"workflow is {own.workflow!r}, but it is {' or '.join(SMALL)}: use one of these")
    iterations = max(3, own.faults // 2)
    given = dict(text.split("=", 1) for text in (*SMALL[own.workflow], *_COMMON, f"run.num_iterations={iterations}"))
    given |= dict(text.split("=", 1) for text in overrides)
    given |= {"run.dir": str(folder), "warm_start.cache_dir": str(folder / "cache")}
    compose = compose_train if own.workflow == "embodied" else compose_math
    return compose([f"{key}={value}" for key, value in given.items()])


# ------------------------------------------------------------------------------------------------------------- faults
KINDS = ("SIGKILL", "SIGSTOP", "exception")
SPECIAL = (("checkpoint", "full disk"), ("transfer", "full store"), ("snapshot", "full store"))
ENDURED = ("full disk", "full store")  # nobody has to recover from these
LAST = ("rollout", "lost node")
FIRST = ("warm start", "profile", "set-up")  # these come once
AGAIN = ("rollout", "update", "transfer", "snapshot", "checkpoint", "evaluation")  # these come in every iteration
MISSING = {"auto": ("transfer",), "collocated": ("profile", "transfer")}  # auto: whatever shares workers may win
_LATEST_S = 0.2  # after a call was submitted


@dataclass(slots=True)
class Fault:
    """What is to happen, and what came of it."""

    phase: str
    kind: str
    draw: float  # in [0, 1): whom it meets
    delay_s: float
    met: str = ""  # the worker and its call
    at: float = 0.0  # seconds since the epoch


def schedule(number: int, seed: int, missing: Sequence[str] = (), nodes: int = 1) -> list[Fault]:
    """Returns faults in the order in which they come: every kind meets every phase when there are enough.

    Args:
        number: of faults.
        seed: of what happens to whom.
        missing: phases that do not come under the plan.
        nodes: with more than one the last fault is the end of a node.
    """
    draw = random.Random(seed)
    pairs = [*SPECIAL, *((phase, kind) for phase in AGAIN for kind in KINDS)]
    pairs = [(phase, kind) for phase, kind in pairs if phase not in missing]
    chosen = [(phase, draw.choice(KINDS)) for phase in FIRST if phase not in missing][: number // 2]
    while len(chosen) < number:
        draw.shuffle(pairs)
        chosen += pairs[: number - len(chosen)]
    if nodes > 1:
        chosen[-1] = LAST
    return [Fault(phase, kind, draw.random(), draw.uniform(0, _LATEST_S)) for phase, kind in chosen]


@dataclass(slots=True)
class Chaos:
    """Faults that come one after the other."""

    faults: list[Fault]
    attempt: int = -1  # in which the last one came
    come: list[Fault] = field(default_factory=list)

    def due(self, phase: str, attempt: int) -> Fault | None:
        """Returns the next fault if it belongs into this phase and the one before was recovered from."""
        if len(self.come) == len(self.faults) or attempt == self.attempt:
            return None
        fault = self.faults[len(self.come)]
        return fault if fault.phase == phase else None

    def happens(self, fault: Fault, attempt: int, met: str) -> None:
        """Notes that a fault comes now."""
        fault.met, fault.at = met, time.time()
        if fault.kind not in ENDURED:
            self.attempt = attempt
        self.come.append(fault)


# --------------------------------------------------------------------------------------------------------- comparison
def disturbed(config: TrainConfig | MathConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None) -> int:
    """Runs a training in this process, to which the faults come; returns the trainer's exit code."""
    from rlinf_embodied.embodied.job import EmbodiedJob  # these import torch, which must find the pins
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.tools.disturbances import ChaosSession
    from rlinf_embodied.training.trainer import Trainer

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
    pin(undisturbed, overrides)
    overrides = [*overrides, f"run.exact={undisturbed.run.exact.value}"]
    straight = train(undisturbed, Chaos([]))
    chaos = Chaos(schedule(own.faults, own.seed, MISSING.get(undisturbed.plan.name, ("profile",)), own.nodes))
    if own.nodes > 1:
        from rlinf_embodied.tools.disturbances import two_nodes

        with two_nodes() as (address, end_node):
            there = [*overrides, "cluster=ray", f"cluster.address={address}"]
            digest = train(configure(own, there, root / "chaos"), chaos, end_node)
    else:
        digest = train(configure(own, overrides, root / "chaos"), chaos)
    print(report(chaos, root / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {digest}: {'equal' if straight == digest else 'NOT EQUAL'}")
    return 0 if straight == digest and len(chaos.come) == own.faults else 1
