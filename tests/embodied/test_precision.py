"""Passes in bfloat16: gradients point as in float32, what is trained stays float32, ratios begin at 1."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from runs import clone, executor_for, exported_weights, iterate, tiny, train, trees
from torch import Tensor

from policies.actor_critic import ActorCritic
from policies.flow_vla import FlowVLA
from policies.state_policy import StatePolicy
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import Critic, PolicyConfig, Precision
from rlinf_embodied.device import require_precision
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.rollout_stage import RolloutStage, computed_in
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Policy, PolicyOutput
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import env_spec, observed

pytestmark = pytest.mark.usefixtures("no_group_stays")

ROWS = 8
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "stem_width": 16, "keypoints": 4, "critic_hidden_size": 16}
LOW = "algorithm.precision=bfloat16"
SHARDED = ["algorithm.sharding=fsdp2", "run.exact=false"]
ONE_STEP = ["algorithm.epochs=1", "algorithm.num_minibatches=1", "algorithm.critic_warmup_iterations=0"]
POLICIES = {"tiny": TinyVLA, "flow": FlowVLA, "state": StatePolicy}


def pair(kind: str, critic: Critic = Critic.privileged) -> tuple[Policy, Policy, Observation]:
    """Returns a policy, the same one in bfloat16, and what it sees."""
    cameras = () if kind == "state" else ("base_camera",)
    env = env_spec("PickCube-v1", ROWS, 3, 12, 2, 6, 9, 16, cameras)
    options = {name: value for name, value in SMALL.items() if hasattr(POLICIES[kind].options_type(), name)}
    config = PolicyConfig(name=kind, critic=critic, options=options)
    policy = POLICIES[kind](config, env, 3)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, 16, 16, 3), generator=draw, dtype=torch.uint8) if cameras else None
    proprio, state = torch.randn(ROWS, 6, generator=draw), torch.randn(ROWS, 9, generator=draw)
    shown = observed(proprio, ("pick up the cube",) * ROWS, images, state)
    return policy, computed_in(Precision.bfloat16, policy, config, "cpu"), shown


def sampled(policy: Policy, shown: Observation) -> tuple[dict[str, Tensor], PolicyOutput]:
    features = policy.encode(shown)
    return features, policy.act(features, policy.spec.noise.draw(0, "action", np.arange(ROWS)), 1.0)


@pytest.mark.parametrize("kind", POLICIES)
def test_what_was_sampled_in_bfloat16_is_scored_alike_in_it(kind: str) -> None:
    _, low, shown = pair(kind)
    features, chosen = sampled(low, shown)
    assert {chosen.actions.dtype, chosen.log_probs.dtype} == {torch.float32}
    with torch.no_grad():
        again = low.evaluate(features, chosen.record, 1.0).log_probs
    assert (again - chosen.log_probs).abs().max() <= 1e-5


def test_a_policy_in_it_has_its_methods_where_python_3_12_looks_for_them() -> None:
    env = env_spec("Pendulum-v1", ROWS, 1, 12, 1, 3, 0, 0, ())
    config = PolicyConfig(name="actor_critic", critic=Critic.observation)
    low = computed_in(Precision.bfloat16, ActorCritic(config, env, 3), config, "cpu")
    for method in ("statistics_sums", "update_statistics"):  # of HasRunningStatistics
        inspect.getattr_static(low, method)  # as isinstance does, which never asks __getattr__


def test_an_iteration_begins_at_a_ratio_of_1_and_moves_float32_weights_sharded_or_not() -> None:
    norms = []
    for variant in ([], SHARDED):
        config = tiny(LOW, *ONE_STEP, *variant)
        executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
        before = exported_weights(executor)
        (row,) = iterate(config, executor, 1)
        assert row["losses/initial_log_ratio"] <= 1e-5
        norms.append(row["losses/grad_norm"])
        after = exported_weights(executor)
        assert {value.dtype for value in after.values() if value.is_floating_point()} == {torch.float32}
        moved = max(float((after[name] - before[name]).abs().max()) for name in after)
        assert 0 < moved < 2e-3  # a step of Adam is as large as its rate, which bfloat16 would round away
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_evaluations_and_checks_compute_as_the_run_does_also_of_its_checkpoints(tmp_path, monkeypatch) -> None:
    made, init = [], RolloutStage.__init__
    noted = lambda self, config: made.append((config.evaluates, config.precision)) or init(self, config)  # noqa: E731
    monkeypatch.setattr(RolloutStage, "__init__", noted)
    train(tiny(LOW, f"run.dir={tmp_path}", "run.num_iterations=1", "run.until_success=1.0", "eval.check_episodes=4"))
    evaluate = [f"checkpoint={tmp_path}/checkpoints/latest", "cluster=serial", "eval.num_episodes=4"]
    evaluate_command(compose_evaluate([*evaluate, f"run.dir={tmp_path}/evaluation"]))
    assert {precision for _, precision in made} == {Precision.bfloat16}
    assert len({evaluates for evaluates, _ in made}) == 2


def test_a_device_that_does_not_compute_in_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.precision is 'bfloat16', but torch has no autocast .*'meta'"):
        require_precision(Precision.bfloat16, "meta")
    require_precision(Precision.float32, "meta")
    require_precision(Precision.bfloat16, "cpu")
