"""How many rows a call of the policy has: a block's where equal bits are promised, otherwise all of a worker's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_calls import acted, rows_of_calls, shown
from runs import clone, executor_for, iterate, tiny, trees

from rlinf_embodied.embodied.evaluation import held_out, policy_stage
from rlinf_embodied.embodied.rollout_stage import RolloutStage, _Rollout
from rlinf_embodied.embodied.warm_start import NewPolicyConfig, NewPolicyStage
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Distribution
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession


def test_the_rows_of_a_call_are_a_blocks_where_equal_bits_are_promised() -> None:
    assert rows_of_calls(tiny()) == [4] * 8
    assert rows_of_calls(tiny("env.rows_per_call=16")) == [4] * 8
    assert rows_of_calls(tiny("run.exact=off")) == [16, 16]
    assert rows_of_calls(tiny("run.exact=off", "env.rows_per_call=9")) == [8, 8, 8, 8]  # whole blocks
    with pytest.raises(ConfigError, match=r"env.rows_per_call is 0, but it must be at least 1: leave it out"):
        tiny("env.rows_per_call=0")


def test_every_block_has_the_actions_and_columns_of_its_own_rows() -> None:
    _, exact, ours = acted(tiny(), frozen=2)
    calls, actions, theirs = acted(tiny("run.exact=off"), frozen=2)
    assert calls == [12, 12]  # a block of frozen rows is left out
    assert actions.keys() == exact.keys()
    assert actions[2] is exact[2] is None
    for block in (0, 1, 3):
        assert torch.equal(actions[block], exact[block])
        assert torch.allclose(ours[block].log_probs, theirs[block].log_probs, atol=1e-5)
        for name, value in ours[block].features.items():
            assert torch.allclose(value.float(), theirs[block].features[name].float(), atol=1e-4)


def test_training_in_calls_of_all_rows_begins_at_a_ratio_of_one() -> None:
    config = tiny("run.exact=off")
    executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
    assert iterate(config, executor, 2)[-1]["losses/initial_log_ratio"] <= 1e-5


def test_actions_of_a_chunk_may_repeat_noise() -> None:
    """Each action alone is sampled as ever; with 1 all actions of a chunk have the noise of the first one."""
    drawn = {}
    for repeat in (0.0, 0.5, 1.0):
        config = tiny(f"policy.noise_repeat={repeat}", "env.num_envs=64", "env.block_size=64")
        stage = RolloutStage(training_workflow(config, str(clone(config))).stages["policy"].config)  # pyright: ignore
        stage.setup(solo_context((0,), "cpu"))
        stage._rollouts[0], kind = _Rollout(), stage._policy.spec.noise
        drawn[repeat] = torch.cat([stage._noise(StepContext(0, chunk_step=step), 0, kind) for step in range(16)])
    none, half, whole = (drawn[repeat] for repeat in (0.0, 0.5, 1.0))
    assert torch.equal(whole, none[:, :1].expand_as(none))
    same = (half[:, 1:] == half[:, :-1]).float().mean()
    assert abs(float(same) - 0.5) < 0.02
    for noise in (half, whole):  # uniform on (0, 1): mean 1/2, variance 1/12
        assert float((noise[:, -1].mean() - 0.5).abs()) < 0.02
        assert float((noise[:, -1].var() - 1 / 12).abs()) < 0.01


def test_greedy_actions_of_a_flow_policy_begin_at_normal_noise_of_each_episode(monkeypatch) -> None:
    config, acts = tiny("policy=flow_vla"), []
    asked = held_out(config.env, replace(config.eval, num_episodes=8, num_envs=4), config.run)
    stage = RolloutStage(policy_stage("eval_policy", config.policy, str(clone(config)), asked).config)  # pyright: ignore
    stage.setup(solo_context((0,), "cpu"))
    act = stage._policy.act
    monkeypatch.setattr(stage._policy, "act", lambda *given: acts.append(given[1:]) or act(*given))
    for step in range(2):
        stage.step(StepContext(0, round=1, chunk_step=step), {0: shown(config.env)})
    kind = stage._policy.spec.greedy_noise
    assert kind is not None
    assert kind.distribution is Distribution.normal
    for step, (noise, temperature) in enumerate(acts):
        assert temperature == 0.0
        assert torch.equal(noise, kind.draw(config.run.seed, "evaluate", range(4, 8), step)), "episodes 4 to 7"


_LATE = ["env.execute_steps=2", "env.chunks_per_rollout=6", "env.perturb.inference_delay=1"]


@pytest.mark.parametrize(
    ("policy", "overrides", "message"),
    [
        ("flow_vla", ["policy.noise_repeat=0.9"], r"noise_repeat is 0.9, but flow_vla takes no separate noise"),
        ("tiny_vla", [*_LATE, "env.rtc=linear"], r"env.rtc is 'linear', but tiny_vla is no flow policy"),
        ("tiny_vla", _LATE, r"env.perturb is {'inference_delay': 1}, but tiny_vla is scored for the first actions"),
    ],
)
def test_what_a_policy_cannot_do_is_refused(policy: str, overrides: list[str], message: str) -> None:
    config, start = tiny(f"policy={policy}", *overrides), clone(tiny(f"policy={policy}"))
    stage = RolloutStage(training_workflow(config, str(start)).stages["policy"].config)  # pyright: ignore
    with pytest.raises(ConfigError, match=message):
        stage.setup(solo_context((0, 1), "cpu"))
    new = NewPolicyStage(NewPolicyConfig(config.env, config.policy, 0, measures=False))
    new.setup(solo_context((0,)))
    with pytest.raises(ConfigError, match=message):  # before it is trained on demonstrations
        new.save_policy(StepContext(0), "x")
