"""Faults on purpose: a training runs twice, undisturbed and with faults, and the weights are compared.

A schedule drawn from a seed says which worker fails in which phase; the next fault comes when the run has recovered
from the one before (disturbances.py).  Nothing that computes is imported before a process is pinned.

    SIGKILL    the worker's process ends; so it does when memory runs out
    SIGSTOP    it hangs
    exception  the call raises
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_embodied import train
from rlinf_embodied.compose import Prepare, compose_math, compose_train, split
from rlinf_embodied.config import ClusterConfig, MathConfig, RunConfig, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers, require_one_of
from rlinf_embodied.telemetry.tables import text_table

if TYPE_CHECKING:
    from rlinf_embodied.runtime.session import Session  # imports numpy, before which a process is pinned

SMALL = {  # trainings of seconds
    "embodied": """
        env=point_reach env.num_envs=16 env.block_size=4 env.obs_size=16 env.chunk=4 env.horizon=12
        env.chunks_per_rollout=4 env.carry_over=true policy.options.hidden_size=32 policy.options.num_layers=1
        policy.options.num_heads=2 policy.options.stem_width=16 policy.options.keypoints=4 policy.options.num_bins=9
        policy.options.critic_hidden_size=16 policy.options.instruction_length=4 algorithm.epochs=2
        algorithm.num_minibatches=2 algorithm.value_epochs=2 algorithm.lr=1e-3 algorithm.target_kl=null
        warm_start.num_demos=32 warm_start.epochs=1 warm_start.head_epochs=16 warm_start.head_batch_size=16
        warm_start.head_lr=5e-3 eval.num_envs=4 eval.record_video=false eval.num_episodes=4 eval.every=1""",
    "reasoning": """
        data.level=sum1-2-9 policy.hidden_size=32 policy.num_layers=1 policy.num_heads=2 policy.intermediate_size=64
        policy.context_length=40 generation.max_new_tokens=20 generation.rows_per_block=8 generation.rows_per_batch=16
        generation.max_num_seqs=16 algorithm.prompts_per_iteration=8 algorithm.group_size=4 algorithm.lr=1e-3
        algorithm.tokens_per_microbatch=256 warm_start.steps=240 warm_start.chain_of_thought_share=0.2
        warm_start.num_examples=1024 warm_start.lr=1e-2 eval.num_problems=16 eval.num_samples=1
        eval.problems_per_block=8 eval.every=1""",
}
_COMMON = """
    plan=disaggregated cluster=local cluster.num_devices=2 cluster.hang_after_s=10 checkpoint.every=1
    recovery.max_restarts=1000 recovery.snapshot_share=1 run.seed=3 run.dir=runs/chaos"""
_MORE_ITERATIONS = 3  # than faults


@dataclass(slots=True, kw_only=True)
class Options:
    """Keys in addition to those of the training."""

    workflow: str = "embodied"  # or reasoning
    faults: int = 20
    seed: int = 7  # of the schedule

    def __post_init__(self) -> None:
        require_one_of(self, "", "workflow", *SMALL)
        require_numbers(self, "", "faults")


@dataclass(slots=True, kw_only=True)
class ChaosConfig(Options):
    """A comparison: the training that is run twice, and its faults."""

    training: Any  # a TrainConfig or MathConfig; its run.dir is where both runs go

    @property
    def run(self) -> RunConfig:
        return self.training.run

    @property
    def folder(self) -> Path:
        return Path(str(self.run.dir)) / f"{self.workflow}-{self.seed}"

    def training_in(self, name: str) -> TrainConfig | MathConfig:
        """Returns the training in a folder of the comparison, with a separate cache."""
        folder = self.folder / name
        start = replace(self.training.warm_start, cache_dir=str(folder / "cache"))
        return replace(self.training, run=replace(self.run, dir=str(folder)), warm_start=start)


def compose_chaos(words: Sequence[str], prepare: Prepare | None = None) -> ChaosConfig:
    """Returns a comparison: its training is small, unless overridden, and has an iteration for each fault."""
    own, overrides = split(Options, words)
    small = [*SMALL[own.workflow].split(), *_COMMON.split(), f"run.num_iterations={own.faults + _MORE_ITERATIONS}"]
    compose = compose_train if own.workflow == "embodied" else compose_math
    return ChaosConfig(**asdict(own), training=compose([*small, *overrides], prepare))


# ------------------------------------------------------------------------------------------------------------- faults
KINDS = ("SIGKILL", "SIGSTOP", "exception")
FIRST = ("warm start", "set-up")  # phases that come once
AGAIN = ("rollout", "update", "transfer", "snapshot", "checkpoint", "evaluation")  # phases of every iteration
_LATEST_S = 0.2  # after a call was submitted


@dataclass(slots=True)
class Fault:
    """A fault, and whom it hit."""

    phase: str
    kind: str
    draw: float  # in [0, 1): chooses the worker
    delay_s: float
    met: str = ""  # the worker and its call
    at: float = 0.0  # seconds since the epoch


def schedule(number: int, seed: int, missing: Sequence[str] = ()) -> list[Fault]:
    """Returns `number` faults in order: every kind in every phase when there are enough, but for missing phases."""
    draw = random.Random(seed)
    pairs = [(phase, kind) for phase in AGAIN for kind in KINDS if phase not in missing]
    chosen = [(phase, draw.choice(KINDS)) for phase in FIRST if phase not in missing][: number // 2]
    while len(chosen) < number:
        draw.shuffle(pairs)
        chosen += pairs[: number - len(chosen)]
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
        fault.met, fault.at, self.attempt = met, time.time(), attempt
        self.come.append(fault)


# --------------------------------------------------------------------------------------------------------- comparison
@dataclass(slots=True, frozen=True)
class Comparison:
    """What came of both runs: their weights' SHA-256, and the faults."""

    undisturbed: str
    disturbed: str
    chaos: Chaos

    @property
    def passed(self) -> bool:
        return len(self.chaos.come) == len(self.chaos.faults) and self.undisturbed == self.disturbed


def disturbed(config: TrainConfig | MathConfig, chaos: Chaos) -> str:
    """Runs a training with faults to its end and returns the digest of its weights."""

    def session(cluster: ClusterConfig) -> Session:
        from rlinf_embodied.tools.disturbances import ChaosSession  # it imports torch, which must find the pins

        return ChaosSession(cluster, chaos)

    return train(config, sessions=session)["weights_sha256"]


def report(chaos: Chaos, folder: Path) -> str:
    """Returns a table of what each fault cost, and the median and the largest cost."""
    path = folder / "recoveries.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = f"{len(chaos.come)} of {len(chaos.faults)} faults came, {len(records)} recoveries"
    rows, costs, ends = [], [], [fault.at for fault in chaos.come[1:]] + [float("inf")]
    for fault, until in zip(chaos.come, ends, strict=False):
        own = [record for record in records if fault.at <= record["at"] < until]
        costs.append(sum(record["lost_s"] + record["recovery_s"] for record in own))
        detected_s = min((record["at"] for record in own), default=fault.at) - fault.at
        seconds = {"detected after s": f"{detected_s:.1f}", "lost s": f"{costs[-1]:.1f}"}
        rows.append({"fault": fault.kind, "phase": fault.phase, "worker and call": fault.met, **seconds})
    if rows:
        last += f"; seconds lost per fault: median {statistics.median(costs):.1f}, worst {max(costs):.1f}"
    return f"{text_table(rows, 'faults:')}\n{last}"


def compare(config: ChaosConfig) -> Comparison:
    """Makes both runs, prints what each fault cost, and returns the comparison.

    Raises:
        ConfigError: the folder holds an earlier comparison.
    """
    rule = f"it has {config.folder}, of an earlier comparison"
    require(not config.folder.exists(), "run.dir", config.run.dir, rule, "use another run.dir, or remove it")
    straight = train(config.training_in("straight"))["weights_sha256"]
    shares = config.training.plan.name in ("auto", "collocated")  # a worker: nothing is transferred
    chaos = Chaos(schedule(config.faults, config.seed, ("transfer",) if shares else ()))
    digest = disturbed(config.training_in("chaos"), chaos)
    print(report(chaos, config.folder / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {digest}: {'equal' if straight == digest else 'NOT EQUAL'}")
    return Comparison(straight, digest, chaos)
