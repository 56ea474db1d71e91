"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos [nodes=1]
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos [nodes=1]

A schedule drawn from the seed says what happens to whom, and in which phase; the next fault comes when the one before
is mended.  With nodes=2 the disturbed run has two Ray nodes, and the last fault is the end of one of them.  Other keys
are those of the training, for example plan=collocated.  Exit code 0: all faults came, and the weights are the same, bit
for bit.

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
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from experiments.bench.harness import parse
from rlinf_embodied import portable
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import ClusterConfig, MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError, RlinfError
from rlinf_embodied.execution.meter import METER
from rlinf_embodied.flow.graph import StageSpec
from rlinf_embodied.telemetry.tables import text_table

KINDS = ("SIGKILL", "SIGSTOP", "exception")
SPECIAL = (("checkpoint", "full disk"), ("transfer", "full store"), ("snapshot", "full store"))
ENDURED = ("full disk", "full store")  # nobody has to recover from these
LAST = ("rollout", "lost node")
FIRST = ("warm start", "profile", "set-up")  # these come once
AGAIN = ("rollout", "update", "transfer", "snapshot", "checkpoint", "evaluation")  # these come in every iteration
MISSING = {"auto": ("transfer",), "collocated": ("profile", "transfer")}  # auto: whatever shares workers may win
_LEARNERS = ("actor", "critic")
_METHODS = {
    "export_weights": "transfer",
    "install_weights": "transfer",
    "export_snapshot": "snapshot",
    "import_snapshot": "restore",
    "send_whole": "restore",
    "save": "checkpoint",
    "export_state": "checkpoint",
}
_LATEST_S = 0.2  # after a call was submitted
_FULL_S = 3.0  # for which the disk or the store is full
_STORE_BYTES = 128 << 20
SMALL = {
    "embodied": (
        *("env=point_reach", "env.num_envs=16", "env.block_size=4", "env.obs_size=16", "env.chunk=4", "env.horizon=12"),
        *("env.chunks_per_rollout=4", "env.carry_over=true", "policy.hidden_size=32", "policy.num_layers=1"),
        *("policy.num_heads=2", "policy.stem_width=16", "policy.keypoints=4", "policy.num_bins=9"),
        *("policy.critic_hidden_size=16", "policy.instruction_length=4", "algorithm.epochs=2"),
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
    *("checkpoint.every=1", "recovery.max_restarts=1000", "run.seed=3", f"cluster.object_store_bytes={_STORE_BYTES}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the comparison."""

    workflow: str = "embodied"
    faults: int = 20
    seed: int = 7
    nodes: int = 1


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


def phase_of(stage: str, method: str) -> str:
    """Returns the phase that a call belongs to."""
    if stage == METER.name:
        return "profile"
    if stage in ("warm_start", "fine_tuning"):
        return "warm start"
    if stage.startswith("eval") or stage == "answers":
        return "evaluation"
    return _METHODS.get(method, "update" if stage in _LEARNERS else "rollout")


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


def later(seconds: float, work: Callable[[], None]) -> None:
    """Does something after a while, unless the program has ended."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def allow_files(pid: int, num_bytes: int | None) -> None:
    """Limits the size of the files that a process writes: 0 lets all writes fail, as on a full disk; None: none."""
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if num_bytes is None else num_bytes, most))


def fill_store(num_bytes: int, seconds: float) -> None:
    """Puts as much into the driver's object store as it holds, for a while."""
    piece = num_bytes // 8
    pieces = [ray.put(np.zeros(piece, dtype=np.uint8)) for _ in range(8)]
    later(seconds, pieces.clear)


def chaos_session(config: ClusterConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None):
    """Returns a session on Ray in which faults happen; `end_node` ends all processes of the second node."""
    from rlinf_embodied.runtime.host import Call, StageContext
    from rlinf_embodied.runtime.ray_session import RaySession
    from rlinf_embodied.runtime.session import Ref

    class ChaosSession(RaySession):
        def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
            fault = chaos.due("set-up", self.attempt) if phase_of(spec.name, "") in ("update", "rollout") else None
            if fault is not None and fault.kind != "exception":
                self._strike(fault, [context.worker for context in contexts], f"{spec.name}.setup")
            elif fault is not None:
                chaos.happens(fault, self.attempt, f"worker {contexts[0].worker}, {spec.name}.setup")
                spec = replace(spec, config=None)  # no stage can do without
            return super().add_stage(spec, contexts)

        def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
            phase = phase_of(calls[0][1].stage, calls[0][1].method) if calls else ""
            fault = chaos.due(phase, self.attempt)
            if fault is None:
                return super().submit(calls, collective)
            chosen = int(fault.draw * len(calls))
            worker, call, payloads = calls[chosen]
            if fault.kind == "full store":
                chaos.happens(fault, self.attempt, f"the store, {call}")
                fill_store(_STORE_BYTES, _FULL_S)
            elif fault.kind == "lost node":
                chaos.happens(fault, self.attempt, f"the second node, {call}")
                end_node()
            elif fault.kind == "exception":
                chaos.happens(fault, self.attempt, f"worker {worker}, {call}")
                wrong = replace(call, method=f"fault_{len(chaos.come)}")  # no stage has it
                calls = [*calls[:chosen], (worker, wrong, payloads), *calls[chosen + 1 :]]
            else:
                self._strike(fault, [worker], str(call))
            return super().submit(calls, collective)

        def _strike(self, fault: Fault, workers: Sequence[int], call: str) -> None:
            """Sends the signal a little later to one of these workers."""
            known = [caller for caller in self._switchboard.ask(0.5).values() if caller.worker in workers]
            if not known:
                return
            caller = known[int(fault.draw * len(known))]
            chaos.happens(fault, self.attempt, f"{caller}, {call}")
            if fault.kind == "full disk":
                allow_files(caller.pid, 0)
                later(_FULL_S, lambda: allow_files(caller.pid, None))
            else:
                later(fault.delay_s, lambda: send(caller.pid, getattr(signal, fault.kind)))

    return ChaosSession(config.call_timeout_s, config.object_store_bytes, config.hang_after_s)


@contextmanager
def two_nodes() -> Iterator[tuple[str | None, Callable[[], None]]]:
    """A Ray cluster of two nodes in this machine: its address, and what ends the second one."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        os.environ["RAY_TMPDIR"] = folder
        nodes = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": _STORE_BYTES},
            shutdown_at_exit=False,
        )
        try:
            second = nodes.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
            yield nodes.address, lambda: nodes.remove_node(second, allow_graceful=False)
        finally:
            ray.shutdown()
            nodes.shutdown()
            del os.environ["RAY_TMPDIR"]


# ---------------------------------------------------------------------------------------------------------------- runs
def configure(own: Options, overrides: Sequence[str], folder: Path) -> TrainConfig | MathConfig:
    """Returns the config of a run: small, unless told otherwise, and with a cache of its own."""
    iterations = max(3, own.faults // 2)
    given = dict(text.split("=", 1) for text in (*SMALL[own.workflow], *_COMMON, f"run.num_iterations={iterations}"))
    given |= dict(text.split("=", 1) for text in overrides)
    given |= {"run.dir": str(folder), "warm_start.cache_dir": str(folder / "cache")}
    compose = compose_train if own.workflow == "embodied" else compose_math
    return compose([f"{key}={value}" for key, value in given.items()])


def train(config: TrainConfig | MathConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None) -> str:
    """Runs a training in this process and returns the digest of its weights."""
    from rlinf_embodied.embodied.job import EmbodiedJob
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.training.trainer import Trainer

    job = EmbodiedJob(config) if isinstance(config, TrainConfig) else ReasoningJob(config)
    code = Trainer(job, sessions=lambda cluster: chaos_session(cluster, chaos, end_node)).run()
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
        lost, mended = (sum(record[key] for record in own) for key in ("lost_s", "recovery_s"))
        seen = min((record["at"] for record in own), default=fault.at) - fault.at
        costs.append(lost + mended)
        kinds.setdefault(fault.kind, []).append((seen, lost + mended))
        again = ", ".join(f"{record['work']}: {repeated(record)}" for record in own) or "nothing"
        seconds = {"seen": seen, "work lost": lost, "recovery": mended}
        row = {"fault": fault.kind, "phase": fault.phase, "met": fault.met, "done again": again}
        rows.append(row | {f"{key} s": f"{value:.1f}" for key, value in seconds.items()})
    last = f"{len(chaos.come)} of {len(chaos.faults)} faults came, {len(records)} recoveries"
    inside = [record["repeated"] for record in records if record["repeated"] is not None]
    if inside:
        last += f"; {len(inside)} of them repeated only what was lost: {shares(records)}"
    if costs:
        last += f"; seconds lost per fault: median {statistics.median(costs):.1f}, worst {max(costs):.1f}"
    by_kind = [
        {"fault": kind, "number": str(len(several))}
        | {f"{name} s": _middle_and_worst([pair[k] for pair in several]) for k, name in enumerate(("seen", "lost"))}
        for kind, several in sorted(kinds.items())
    ]
    return "\n".join([text_table(rows, "faults:"), text_table(by_kind, "by kind:"), last] if rows else [last])


def repeated(record: Mapping[str, Any]) -> str:
    """Returns what a recovery did again, for example "2 of 4 blocks, 1 update"."""
    if record["repeated"] is None:
        return "all of it"
    blocks, updates = _blocks(record), int(any(stage in _LEARNERS for stage in record["repeated"]))
    told = [f"{blocks} of {record['num_blocks']} blocks"] * bool(blocks) + [f"{updates} update"] * bool(updates)
    return ", ".join(told) or "nothing"


def _blocks(record: Mapping[str, Any]) -> int:
    """Returns the blocks that were sampled or scored again."""
    return max((number for stage, number in record["repeated"].items() if stage not in _LEARNERS), default=0)


def shares(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns how much of an iteration's blocks its mended faults cost: the median and the worst."""
    found = [_blocks(record) / max(1, record["num_blocks"]) for record in records if record["repeated"] is not None]
    return f"blocks, median {100 * statistics.median(found):.0f} %, worst {100 * max(found):.0f} %"


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
            disturbed = train(configure(own, there, root / "chaos"), chaos, end_node)
    else:
        disturbed = train(configure(own, overrides, root / "chaos"), chaos)
    print(report(chaos, root / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {disturbed}: {'equal' if straight == disturbed else 'NOT EQUAL'}")
    return 0 if straight == disturbed and len(chaos.come) == own.faults else 1


def main(arguments: Sequence[str]) -> int:
    own, overrides = parse(Options, arguments)
    if own.workflow not in SMALL:
        raise ConfigError(f"workflow is {own.workflow!r}, but it is {' or '.join(SMALL)}")
    folders = [text.removeprefix("run.dir=") for text in overrides if text.startswith("run.dir=")]
    root = Path(folders[-1] if folders else "runs/chaos") / f"{own.workflow}-{own.seed}"
    if root.exists():
        raise ConfigError(f"run.dir has {root}, of an earlier comparison: use another run.dir, or remove it")
    overrides = [text for text in overrides if not text.startswith("run.dir=")]
    try:
        portable.pin()
    except ConfigError:
        overrides.append("run.exact=exact")  # this processor compares with itself
    return compare(own, overrides, root)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RlinfError as error:
        sys.exit(f"error: {error}")
