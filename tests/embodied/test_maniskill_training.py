"""Two iterations on the real simulator: what a plan is on the toy, it is there as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import digest, executor_for, iterate, tiny, trees

from policies.tiny_vla import TinyVLA
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.runtime.session import SerialSession

PICK = ["env=maniskill_pick", "env.num_envs=4", "env.block_size=2", "env.obs_size=32", "env.chunk=5"]
SHORT = ["env.horizon=10", "env.chunks_per_rollout=3", "algorithm.critic_warmup_iterations=0"]


def untrained(config: TrainConfig, folder: Path) -> Path:
    """A policy that has learned nothing: a clone would cost a minute."""
    env = make_env(config.env, config.env.block_size, "cpu")
    save_policy(TinyVLA(config.policy, env.spec, seed=0), folder, config.env, config.policy)
    env.close()
    return folder


@pytest.mark.sim
def test_collocated_and_disaggregated_training_agree_bit_for_bit_on_pick_cube(tmp_path) -> None:
    config = tiny(*PICK, *SHORT)
    folder = untrained(config, tmp_path / "policy")
    found = {}
    for name, devices, plan in (
        ("collocated", 1, trees("all", "all", "all")),
        ("disaggregated", 2, trees("0:1/2", "1/2:1", "1/2:1", shards=2)),
    ):
        executor = executor_for(config, plan, devices, SerialSession(), folder)
        metrics = iterate(config, executor, 2)
        found[name] = (digest(executor), metrics)
    assert found["collocated"] == found["disaggregated"]
    _, metrics = found["collocated"]
    assert all(m["losses/initial_log_ratio"] <= 1e-5 for m in metrics)
    assert all(m["rollout/env_steps"] == 4 * 3 * 5 for m in metrics)
    assert metrics[-1]["losses/policy_steps"] == 4  # 2 epochs of 2 minibatches
