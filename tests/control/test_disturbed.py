"""Learning from transitions that loses a worker makes again what is lost, and ends with equal weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from control_runs import RLPD, reach, small, trees
from deferred_session import DeferredSession, Fault
from runs import drawing, metric_rows

from rlinf_embodied.control.job import ControlJob
from rlinf_embodied.embodied import job as job_module
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.training.trainer import Trainer

SHORT = ["eval.num_episodes=2", "eval.num_envs=2", "checkpoint.every=4"]
KINDS = {"sac": lambda *words: small(*words), "rlpd": lambda *words: reach(*RLPD, *words)}
HURT = {
    "sac": 2,
    "rlpd": 3,
}  # the iteration in which the worker is lost: there have been updates, or the first are made
PLANS = {
    "collocated": (2, trees("all", "all", "all", "all")),
    "apart": (4, trees([0], [1], [2], [3], shards=2)),
    "unlike splits": (3, trees([0, 1], [2], [0, 2], [1, 2], shards=2)),
}
STAGES = ("env", "policy", "replay", "learner")


# kind, plan; stage, method and chunk-step of the call; after it or before; the blocks of each stage that are made again
CASES = {
    "sac, collocated, the updates": ("sac", "collocated", ("learner", "run", 0), False, (2, 2, 2, 4)),
    "sac, apart, the updates": ("sac", "apart", ("learner", "run", 0), True, (0, 0, 0, 4)),
    "sac, apart, what is kept": ("sac", "apart", ("replay", "run", 0), True, (0, 0, 4, 4)),
    "sac, apart, weights are received": ("sac", "apart", ("policy", "install_weights", 0), False, (0, 0, 0, 0)),
    "sac, unlike splits, the rollout": ("sac", "unlike splits", ("env", "step", 2), True, (4, 4, 4, 4)),
    "rlpd, unlike splits, what is kept": ("rlpd", "unlike splits", ("replay", "run", 0), False, (4, 4, 4, 4)),
    "rlpd, unlike splits, the updates": ("rlpd", "unlike splits", ("learner", "run", 0), True, (4, 4, 4, 4)),
}
LIGHT = ("sac, collocated, the updates", "sac, apart, what is kept", "rlpd, unlike splits, the updates")


def at(stage: str, method: str, chunk_step: int, iteration: int) -> Callable[[int, Call], bool]:
    """Returns what finds the first such call of an iteration."""

    def meets(number: int, call: Call) -> bool:
        when = call.step_context
        return (call.stage, call.method, when.chunk_step, when.iteration) == (stage, method, chunk_step, iteration)

    return meets


def trained(folder: Path, kind: str, plan: str, session: Session) -> str:
    """Returns the digest of all networks, those of the learner alone included."""
    devices, (variant,) = PLANS[plan]
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"name": plan, "trees": [{**variant, "min_devices": devices}]}))
    config = KINDS[kind](f"run.dir={folder / 'run'}", f"plan={path}", f"cluster.num_devices={devices}", *SHORT)
    with drawing(job_module, False):
        assert Trainer(ControlJob(config), sessions=lambda cluster: session).run() == 0
    return json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder and the digest of an undisturbed run in one process."""
    made: dict[str, tuple[Path, str]] = {}

    def run(kind: str) -> tuple[Path, str]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, trained(folder, kind, "collocated", SerialSession()))
        return made[kind]

    return run


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in LIGHT else pytest.mark.slow) for c in CASES])
def test_only_what_is_lost_is_made_again(tmp_path, straight, case) -> None:
    kind, plan, call, after, repeated = CASES[case]
    folder, digest = straight(kind)
    assert trained(tmp_path, kind, plan, DeferredSession([Fault(at(*call, HURT[kind]), after=after)])) == digest
    assert metric_rows(tmp_path / "run") == metric_rows(folder / "run")
    (line,) = (tmp_path / "run" / "recoveries.jsonl").read_text().splitlines()
    told = json.loads(line)["repeated"]
    assert tuple(told.get(stage, 0) for stage in STAGES) == repeated
