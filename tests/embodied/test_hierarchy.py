"""Two levels of policies: what a choice is for the lower one, a decision for the higher one, whole runs, bad input."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from hierarchical_runs import placed, two_levels
from runs import FOUR, executor_for, iterate, train, trainer_of

from policies.actor_critic import ActorCritic
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, TwoLevelColumns
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import HierarchyConfig
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.hierarchy import guided, low_level_columns
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import observed

ANY = HierarchyConfig(every=2, columns=[2, 0], goal_low=[-1.0, 0.0], goal_high=[1.0, 4.0])


def seen(*rows: list[float]) -> Observation:
    return observed(torch.tensor(rows), tuple(f"task {k}" for k in range(len(rows))))


# --------------------------------------------------------------------------------------------------- what a choice is
def test_any_goal_between_the_bounds_takes_the_place_of_the_tasks() -> None:
    shown = seen([5.0, 6.0, 7.0], [5.0, 6.0, 7.0])
    found = guided(ANY, shown, torch.tensor([[0.0, -1.0], [3.0, 0.5]]))
    assert found.proprio.tolist() == [[0.0, 6.0, 0.0], [3.0, 6.0, 1.0]]  # clipped to the bounds
    assert shown.proprio[0].tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(("to_goal", "way"), [(True, 2.0 - 5.0), (False, 5.0 - 2.0)])
def test_the_way_to_the_goal_changes_with_it(to_goal: bool, way: float) -> None:
    # the place is 5; the task's goal 9 becomes 2
    one = HierarchyConfig(every=2, columns=[1], way_columns=[2], way_to_goal=to_goal, goal_low=[0.0], goal_high=[4.0])
    found = guided(one, seen([5.0, 9.0, 9.0 - 5.0 if to_goal else 5.0 - 9.0]), torch.tensor([[0.0]]))
    assert found.proprio.tolist() == [[5.0, 2.0, way]]


def test_one_of_several_is_the_largest_entry() -> None:
    instructed = HierarchyConfig(every=1, instructions=["left", "right"])
    assert guided(instructed, seen([1.0], [1.0]), torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).instruction == (
        "left",
        "right",
    )


def test_the_lower_level_is_valued_with_the_choice_that_held() -> None:
    steps, no, end = torch.zeros(3, 1, 1), torch.zeros(3, 1, 1, dtype=torch.bool), torch.tensor([[1, 0]])
    cut = torch.tensor([False, True, False]).reshape(3, 1, 1)
    env = EnvColumns(steps, no, cut, ~no, None, seen([99.0]), end, seen([1.0]), torch.zeros(1).bool())
    low, high = (PolicyColumns({}, {}, torch.zeros(0), version) for version in (1, 2))
    choices = torch.tensor([[[-1.0]], [[0.0]], [[1.0]]])
    one = HierarchyConfig(every=2, columns=[0], goal_low=[0.0], goal_high=[2.0])
    level, found = low_level_columns(one, TwoLevelColumns(low, high, choices), env)
    assert level.version == 1
    assert found.final is not None
    assert (found.final.proprio.tolist(), found.last.proprio.tolist()) == ([[1.0]], [[2.0]])


# ---------------------------------------------------------------------------------------------------------- whole runs
def four(folder: Path, *overrides: str):
    return two_levels(f"run.dir={folder}", *FOUR, *overrides)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("two_levels")
    return folder, train(four(folder))


def test_a_checkpoint_acts_with_both_of_its_policies(straight, tmp_path) -> None:
    folder, summary = straight
    words = [f"checkpoint={folder}/checkpoints/latest", f"run.dir={tmp_path}", "cluster=serial"]
    words += ["eval.num_episodes=3", "eval.num_envs=3", "eval.record_video=false"]
    found = evaluate_command(compose_evaluate(words))
    assert found["return"] == summary["after"]["return"]


def test_a_frozen_lower_level_stays_as_it_is(straight, tmp_path) -> None:
    folder, _ = straight
    start = folder / "checkpoints" / "latest"
    given = [f"warm_start.checkpoint={start}", "warm_start.from_scratch=false", "hierarchy.frozen=true"]
    train(four(tmp_path, *given))
    after = tmp_path / "checkpoints" / "latest"
    assert (after / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert (after / "high" / "model.safetensors").read_bytes() != (start / "high" / "model.safetensors").read_bytes()
    begun = [name for name in ("checkpoints", "metrics.jsonl") if (tmp_path / name).exists()]
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004")
    assert len(begun) == 2
    again = train(four(tmp_path, *given))
    assert again["iterations"] == 4


@pytest.fixture(scope="module")
def instructed(straight, tmp_path_factory) -> tuple[list[str], Path]:
    """What begins a run of a low-level policy that stays as it is, and the folder of that policy."""
    first = straight[0] / "checkpoints" / "step_000002"
    latest = tmp_path_factory.mktemp("latest") / "latest"
    latest.symlink_to(first)
    return [f"warm_start.checkpoint={latest}", "warm_start.from_scratch=false", "hierarchy.frozen=true"], first


def low_level(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_frozen_lower_level_does_what_it_holds_for_best(instructed, tmp_path, monkeypatch) -> None:
    seen, act = set(), ActorCritic.act

    def noted(policy, features, noise, temperature):
        seen.add((policy.spec.chunk, noise is not None))
        return act(policy, features, noise, temperature)

    monkeypatch.setattr(ActorCritic, "act", noted)
    train(four(tmp_path, *instructed[0], "run.num_iterations=1"))
    high, low = 1, 4  # actions of a chunk
    assert {chunk for chunk, sampled in seen if sampled} == {high}
    assert (low, False) in seen


def test_a_frozen_lower_level_continues_though_the_checkpoint_that_it_came_from_is_dropped(
    instructed, tmp_path
) -> None:
    given, first = instructed
    given = [
        *given,
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "recovery.max_restarts=0",
        "hierarchy.algorithm.epochs=1",
    ]
    train(four(tmp_path, *given, "run.num_iterations=1"))
    assert train(four(tmp_path, *given))["iterations"] == 4
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000004"]
    assert low_level(tmp_path / "checkpoints" / "latest") == low_level(first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.max_staleness=1", "algorithm.tis_cap=2"], r"plan.max_staleness is 1, but what two levels .*: use 0"),
        (["hierarchy.policy._target_=policies.none.P"], r"^hierarchy\.policy\._target_ is 'policies\.none\.P'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        trainer_of(two_levels(*words))


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
