"""Passes compiled by torch learn what others learn, but for rounding, and have the same bits under every plan.

As a program this trains and prints what came of it: what checks array types in the tests' process cannot be compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from runs import SFT, digest, executor_for, iterate, tiny, trees

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession

WORDS = [
    *("policy=actor_critic", "policy.options.hidden_size=8", "env.cameras=[]", "env.auto_reset=true"),
    *("env.chunks_per_rollout=3", "warm_start.from_scratch=true", "run.tensorboard=false"),  # a board counts ratios
    *("algorithm.one_optimizer=true", "algorithm.critic_warmup_iterations=0"),
]
COMPILED = [*WORDS, "algorithm.compile=true", "run.exact=exact"]


def trained(words: list[str], workers: int) -> tuple[str, list[float], list[dict[str, float]]]:
    """Returns digest, weights and metrics of training by one worker or two."""
    config = tiny(*words)
    plan = trees("all" if workers == 1 else "0:1/2", "all", "all", shards=workers)
    executor = executor_for(config, plan, workers, SerialSession())
    metrics = iterate(config, executor, 1)
    weights = executor.call("actor", "export_weights", StepContext(1))[0].tensors
    return digest(executor), [x for part in weights.values() for x in part.flatten().tolist()], metrics


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
def test_training_is_the_same_but_for_rounding_and_under_every_plan() -> None:
    faster = {
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # for one program
    env = os.environ | faster | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    eager, one, apart = json.loads(run.stdout)
    assert one == apart
    assert one[0] != eager[0], "kernels round otherwise; if not, nothing was compiled"
    assert one[1] == pytest.approx(eager[1], rel=1e-4, abs=1e-6)
    assert all(x == pytest.approx(y, rel=1e-4, abs=1e-6) for x, y in zip(one[2], eager[2], strict=True))


def test_what_compiled_passes_do_not_go_with_is_named() -> None:
    for words, said in (
        (["run.exact=portable"], "compile is True, .*compiled kernels are specific to one: set run.exact=exact"),
        (["run.exact=off", "algorithm.sharding=fsdp2"], "sharding is 'fsdp2', .*policy is not compiled.*use none"),
        (["run.exact=exact", "env.auto_reset=false"], "compile is True, .*set env.auto_reset=true, or false"),
        ([*SFT, "run.exact=exact"], "compile is True, .*passes of fine-tuning are not compiled: use false"),
    ):
        with pytest.raises(ConfigError, match=rf"algorithm\.{said}"):
            tiny("algorithm.compile=true", *words)


if __name__ == "__main__":
    print(json.dumps([trained(WORDS, 1), trained(COMPILED, 1), trained(COMPILED, 2)]))
