"""What two levels are given: keys are named by their path, and policies and precisions are those of their level."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hierarchical_runs import placed, two_levels
from runs import executor_for, iterate, train, trainer_of

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.session import SerialSession

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "examples"))
OTHERS = ["hierarchy.goal_low=-", "hierarchy.goal_high=-"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hierarchy.algorithm.gamma=2"], r"^hierarchy\.algorithm\.gamma is 2\.0, but it must lie in \[0, 1\]"),
        (["hierarchy.policy.temperature=0"], r"^hierarchy\.policy\.temperature is 0\.0, but it must be positive"),
        (
            ["hierarchy.algorithm.reduction=fast"],
            r"^hierarchy\.algorithm\.reduction is 'fast', but run\.exact=true .* hierarchy\.algorithm\.reduction=auto",
        ),
        (
            ["hierarchy.instructions=[a,b]", "hierarchy.way_columns=[0,1]", "hierarchy.columns=-", *OTHERS],
            r"^hierarchy\.way_columns is \[0, 1\], but an instruction has none",
        ),
    ],
)
def test_keys_of_the_higher_level_are_named_by_their_own_path(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two_levels(*words)


def test_columns_that_the_env_has_not_are_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"hierarchy\.columns is \[2, 9\], but the proprioception .* 0\.\.3"):
        trainer_of(two_levels("hierarchy.columns=[2,9]", f"run.dir={tmp_path}")).run()


def test_the_higher_level_may_be_a_policy_of_a_user(tmp_path) -> None:
    own = ["_target_=own_policy.OwnPolicy", "name=own", "options.std=0.5", "critic=observation"]
    own += ["options.hidden_size=-", "options.num_layers=-"]  # which it does not have
    short = ["run.num_iterations=1", "eval.num_episodes=2", "eval.num_envs=2", f"warm_start.cache_dir={tmp_path}"]
    config = two_levels(f"run.dir={tmp_path / 'run'}", *short, *(f"hierarchy.policy.{word}" for word in own))
    assert train(config)["iterations"] == 1
    assert (tmp_path / "run" / "checkpoints" / "latest" / "high" / "model.safetensors").exists()


def test_the_higher_level_decides_in_the_precision_that_it_is_trained_in() -> None:
    config = two_levels("hierarchy.algorithm.precision=bfloat16", "run.exact=false")
    (metrics,) = iterate(config, executor_for(config, placed([0], [0], [0], [0]), 1, SerialSession()), 1)
    assert metrics["high/losses/initial_log_ratio"] < 1e-5
