"""What portable bits cost: the same small runs with run.exact=exact and run.exact=portable, alternating.

python experiments/bench_portable.py rounds=5 out=portable.json      parts: clone, ppo, language

    clone      an epoch of cloning the whole policy (convolutions forward and backward) from random pictures
    ppo        the policy's side of an iteration: act on every chunk-step, then the epochs of the update
    language   an iteration of GRPO on the default tiny model (generation, rewards, update)

Each arm is a process of its own, since what is pinned cannot be undone; seconds are CPU seconds of that process,
medians of `repeats` after one that is not counted.  Ratios are of neighbouring rounds: portable over exact.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

PARTS = ("clone", "ppo", "language")


def _policy():
    import torch

    from policies.tiny_vla import TinyVLA
    from rlinf_embodied.compose import compose_train
    from rlinf_embodied.interfaces import EnvSpec, Observation
    from rlinf_embodied.targets import load_target

    config = compose_train(["env=maniskill_pick"])
    env = config.env
    cameras = tuple(env.cameras)
    spec = EnvSpec(env.task, env.num_envs, env.chunk, env.horizon, 7, 18, 42, env.obs_size, cameras, "none")
    policy = cast(TinyVLA, load_target(config.policy._target_)(config.policy, spec, 0))
    draw = torch.Generator().manual_seed(0)

    def observe(rows: int) -> Observation:
        shape = (rows, len(env.cameras), env.obs_size, env.obs_size, 3)
        pictures = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        proprio = torch.randn(rows, spec.proprio_dim, generator=draw)
        return Observation(images=pictures, proprio=proprio, instruction=("pick up the cube",) * rows, privileged=None)

    return config, policy, observe


def clone() -> Callable[[], object]:
    import torch

    config, policy, observe = _policy()
    data, draw = observe(128), torch.Generator().manual_seed(1)
    actions = torch.rand(128, config.env.chunk, policy.spec.action_dim, generator=draw) * 2 - 1
    parameters = policy.imitation_parameters(True)

    def run() -> None:
        for start in range(0, 128, 8):  # a minibatch of 32 is 8 rows of each of four blocks
            rows = list(range(start, start + 8))
            loss = policy.imitation_loss(policy.encode_trainable(data.rows(rows)), actions[rows], {})
            torch.autograd.grad(loss, parameters, allow_unused=True)

    return run


def ppo() -> Callable[[], object]:
    import torch

    config, policy, observe = _policy()
    rows, steps = config.env.block_size, 4
    observations = [observe(rows) for _ in range(steps)]
    noise = torch.rand(rows, config.env.chunk, policy.spec.action_dim, generator=torch.Generator().manual_seed(1))
    parameters = policy.policy_parameters()

    def run() -> None:
        kept = []
        for observation in observations:
            features = policy.encode(observation)
            kept.append((features, policy.act(features, noise, 0.6).tokens))
        for _ in range(config.algorithm.epochs):
            for features, tokens in kept:
                log_probs, entropy = policy.evaluate(features, tokens, 0.6)
                torch.autograd.grad(log_probs.sum() + entropy.sum(), parameters, allow_unused=True)

    return run


def language() -> Callable[[], object]:
    from rlinf_embodied.cluster.hardware import Cluster
    from rlinf_embodied.compose import compose_math
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.plan import resolve
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.reasoning.warm_start import starting_policy
    from rlinf_embodied.reasoning.workflow import training_workflow
    from rlinf_embodied.runtime.session import SerialSession
    from rlinf_embodied.training.job import Progress

    config = compose_math(["cluster=serial", "plan=collocated", "warm_start.steps=20", "warm_start.num_examples=256"])
    session, cluster = SerialSession(), Cluster("bench", "cpu", 1, 1, 0)
    folder = starting_policy(config, session, cluster, lambda *said: None)
    workflow = training_workflow(config, str(folder))
    executor = Executor(workflow, resolve("bench", config.plan.trees, 1, workflow), session, cluster)
    job = ReasoningJob(config)
    return lambda: job.run_iteration(executor, Progress())


MAKERS: dict[str, Callable[[], Callable[[], object]]] = {"clone": clone, "ppo": ppo, "language": language}


def arm(part: str, exactness: str, repeats: int) -> float:
    """Returns the median CPU seconds of a part in this process."""
    if exactness == "portable":
        from rlinf_embodied import portable

        portable.pin()
    import torch

    torch.set_num_threads(1)
    run = MAKERS[part]()
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def main(arguments: Sequence[str]) -> int:
    given = {"rounds": "3", "repeats": "5", "parts": ",".join(PARTS), "out": ""} | dict(
        text.split("=", 1) for text in arguments
    )
    if "arm" in given:
        part, exactness = given["arm"].split("/")
        print(json.dumps(arm(part, exactness, int(given["repeats"]))))
        return 0
    result: dict[str, dict[str, list[float]]] = {}
    for part in given["parts"].split(","):
        found: dict[str, list[float]] = {"exact": [], "portable": []}
        for number in range(int(given["rounds"])):
            for exactness in ("exact", "portable") if number % 2 == 0 else ("portable", "exact"):
                command = [sys.executable, __file__, f"arm={part}/{exactness}", f"repeats={given['repeats']}"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[exactness].append(float(json.loads(done.stdout.splitlines()[-1])))
        ratios = [p / e for p, e in zip(found["portable"], found["exact"], strict=True)]
        result[part] = found | {"ratio": ratios}
        print(
            f"{part}: exact {statistics.median(found['exact']):.3f} s, portable "
            f"{statistics.median(found['portable']):.3f} s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )
    if given["out"]:
        Path(given["out"]).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
