"""Trains with compiled passes, in a process of its own: what checks array types in the tests' cannot be compiled.

python tests/compiled_runs.py      prints what came of it as JSON, {name: {arm: {digest, metrics, graphs}}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import control_runs
import runs
from torch._dynamo.utils import counters

from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.runtime.session import SerialSession

ITERATIONS = 3
COMPILED = ["algorithm.compile=true", "run.exact=exact"]
STATE = ["policy=actor_critic", "env.cameras=[]", "warm_start.from_nothing=true"]
# of GRPO the number of samples, and so of rows in a minibatch, is another one for each block and iteration: 8, 0, 11
VARIANTS = {"ppo": [*STATE, "env.hold_steps=1"], "grpo": [*STATE, *runs.GRPO, "algorithm.success_only=false"]}


def embodied(words: list[str], split: bool) -> tuple[str, list[dict[str, float]]]:
    """Returns digest and metrics of PPO or GRPO, by one worker or spread over two."""
    config = runs.tiny(*words)
    devices, plan = (2, runs.trees("0:1/2", "all", "all", shards=2)) if split else (1, runs.trees("all", "all", "all"))
    session = SerialSession()
    folder = EmbodiedJob(config).starting_policy(session, runs.cluster(1), lambda *progress: None)
    executor = runs.executor_for(config, plan, devices, session, folder)
    metrics = runs.iterate(executor, ITERATIONS)
    return runs.digest(executor), metrics


def control(words: list[str], split: bool) -> tuple[str, list[dict[str, float]]]:
    """Returns the same of SAC."""
    plan = control_runs.trees([0], [1], [0], [0, 1]) if split else control_runs.trees("all", "all", "all", "all")
    return control_runs.trained(control_runs.small(*words), plan, 1 + split, SerialSession())


def told(train: Callable[[list[str], bool], tuple], words: list[str], split: bool) -> dict[str, object]:
    """Returns what came of a training, and how many passes were compiled."""
    counters.clear()
    digest, metrics = train(words, split)
    return {"digest": digest, "metrics": metrics, "graphs": counters["stats"]["unique_graphs"]}


def main() -> None:
    """Trains each with passes as they are, compiled, and compiled in two workers."""
    trainings = {name: (embodied, words) for name, words in VARIANTS.items()} | {"sac": (control, [])}
    found = {
        name: {
            "eager": told(train, words, split=False),
            "compiled": told(train, [*words, *COMPILED], split=False),
            "apart": told(train, [*words, *COMPILED], split=True),
        }
        for name, (train, words) in trainings.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
