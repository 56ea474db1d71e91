"""All pieces of the benchmark of rollouts do the same work."""

import pytest

from experiments.bench.rollout import parts
from rlinf_embodied.compose import compose_train

SMALL = [
    "env.num_envs=8",
    "env.block_size=2",
    "env.obs_size=16",
    "env.horizon=10",
    "policy.options.hidden_size=32",
    "policy.options.num_layers=1",
    "policy.options.num_heads=2",
    "policy.options.stem_width=16",
    "policy.options.keypoints=4",
    "policy.options.num_bins=9",
    "policy.options.critic_hidden_size=16",
]


@pytest.mark.sim
@pytest.mark.slow
def test_stock_env_and_rollout_do_the_same_work(tmp_path):
    from envs.maniskill import make_env
    from policies.tiny_vla import TinyVLA
    from rlinf_embodied.embodied.policy_folder import save_policy

    config = parts.bench_config(compose_train(SMALL), chunk_steps=3)  # a horizon of two chunks: every row is reset once
    env = make_env(config.env, 1)
    save_policy(TinyVLA(config.policy, env.spec, seed=0), tmp_path, config.env, config.policy)
    env.close()
    bench = parts.Bench(config, str(tmp_path), worker=0, num_workers=2, stock_steps=3)
    assert {getattr(bench, name)().count for name in ("rollout", "env")} == {4 * 3 * 5}
    assert bench.stock().count == 3
