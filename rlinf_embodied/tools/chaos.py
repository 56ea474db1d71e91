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
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied import begin
from rlinf_embodied.command_line import pin
from rlinf_embodied.compose import Prepare, compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.tables import text_table

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
    recovery.max_restarts=1000 recovery.snapshot_share=1 run.seed=3"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the comparison."""

    workflow: str = "embodied"  # or reasoning
    faults: int = 20
    seed: int = 7  # of the schedule


def configure(
    own: Options, overrides: Sequence[str], folder: Path, prepare: Prepare | None = None
) -> TrainConfig | MathConfig:
    """Returns the config of a run: small, unless overridden, and with a separate cache.

    Raises:
        ConfigError: there is no such workflow, or an override is wrong.
    """
    if own.workflow not in SMALL:
        raise ConfigError(f"workflow is {own.workflow!r}, but it is {' or '.join(SMALL)}: use one of these")
    words = [*SMALL[own.workflow].split(), *_COMMON.split(), f"run.num_iterations={max(3, own.faults // 2)}"]
    given = dict(word.split("=", 1) for word in (*words, *overrides))
    given |= {"run.dir": str(folder), "warm_start.cache_dir": str(folder / "cache")}
    compose = compose_train if own.workflow == "embodied" else compose_math
    return compose([f"{key}={value}" for key, value in given.items()], prepare)


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
def disturbed(config: TrainConfig | MathConfig, chaos: Chaos) -> int:
    """Runs a training with faults in this process; returns the trainer's exit code."""
    job = begin(config)
    from rlinf_embodied.tools.disturbances import ChaosSession  # these import torch, which must find the pins
    from rlinf_embodied.training.trainer import Trainer

    return Trainer(job, sessions=lambda cluster: ChaosSession(cluster, chaos)).run()


def train(config: TrainConfig | MathConfig, chaos: Chaos) -> str:
    """Runs a training to its end and returns the digest of its weights."""
    code = disturbed(config, chaos)
    assert code == 0, f"a run that nobody interrupts ended with {code}"
    return json.loads((Path(str(config.run.dir)) / "summary.json").read_text())["weights_sha256"]


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


def compare(own: Options, overrides: Sequence[str], root: Path) -> int:
    """Makes both runs, prints the comparison, and returns the exit code."""
    undisturbed = configure(own, overrides, root / "straight")
    pin(undisturbed, overrides)
    overrides = [*overrides, f"run.exact={undisturbed.run.exact.value}"]
    straight = train(undisturbed, Chaos([]))
    shares = undisturbed.plan.name in ("auto", "collocated")  # a worker: nothing is transferred
    chaos = Chaos(schedule(own.faults, own.seed, ("transfer",) if shares else ()))
    digest = train(configure(own, overrides, root / "chaos"), chaos)
    print(report(chaos, root / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {digest}: {'equal' if straight == digest else 'NOT EQUAL'}")
    return 0 if straight == digest and len(chaos.come) == own.faults else 1
