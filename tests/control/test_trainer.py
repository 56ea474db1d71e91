"""A run of learning from transitions: what it leaves, how it resumes, what it survives, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from control_runs import DAGGER, HG_DAGGER, RECAP, reach, recorded, small
from runs import metric_rows, train, weights_of
from stopped_runs import same_end

from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning.checkpoint import load_tensors


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    train(small(f"run.dir={folder}"))
    return folder


def test_a_run_warms_up_then_learns_and_forgets_the_oldest(straight) -> None:
    rows = metric_rows(straight)
    assert [row["losses/updates"] for row in rows] == [0, 4, 4, 4]
    assert [row["rollout/replay_size"] for row in rows] == [40, 80, 120, 120]
    assert all(row["rollout/env_steps"] == 40 for row in rows)


def test_a_checkpoint_holds_transitions_networks_and_moments(straight) -> None:
    newest = straight / "checkpoints/latest"
    names = {path.stem for path in (newest / "training_state").iterdir()}
    networks = {"critics", "target_critics", "entropy_coef"}
    assert names == {"replay", "carry_over", "critics_optimizer", "policy_optimizer", *networks}
    assert {name: tuple(t.shape) for name, t in load_tensors(newest, "replay").items() if name.startswith("3.")} == {
        "3.replay.state": (30, 3),
        "3.replay.action": (30, 1),
        "3.replay.reward": (30,),
        "3.replay.next_state": (30, 3),
        "3.replay.terminated": (30,),
        "3.replay.cursor": (1,),
    }


@pytest.mark.parametrize(("algorithm", "kept"), [(HG_DAGGER, {1.0}), (RECAP, {0.0, 1.0})], ids=["hg_dagger", "recap"])
def test_a_resumed_buffer_flags_what_the_human_did(tmp_path, algorithm: list[str], kept: set[float]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(reach(*algorithm, f"run.dir={whole}"))
    for words in (["run.num_iterations=2"], []):
        train(reach(*algorithm, f"run.dir={parts}", *words))
        held = load_tensors(parts / "checkpoints/latest", "replay")
        # after the demonstrations, HG-DAgger stores corrections only, RECAP the policy's steps as well
        assert {x for n, t in held.items() if n.endswith("is_intervention") for x in t[-10:].tolist()} == kept
    same_end(parts, whole)


@pytest.mark.parametrize("algorithm", ["iql", pytest.param("bc", marks=pytest.mark.slow)])
def test_a_resumed_run_of_recorded_transitions_ends_as_an_uninterrupted_one(straight, tmp_path, algorithm: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cosine = ["algorithm.cosine=false"] if algorithm == "iql" else []  # it depends on the length
    for folder, words in ((whole, []), (parts, ["run.num_iterations=2"]), (parts, [])):
        train(recorded(algorithm, straight, f"run.dir={folder}", *cosine, *words))
    assert weights_of(whole) == weights_of(parts)
    assert metric_rows(whole) == metric_rows(parts)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (
            ["env.id=CartPole-v1"],
            ConfigError,
            r"policy\.name is 'soft_actor', but the actions of CartPole-v1 are the ch",
        ),
        (["policy=actor_critic"], ConfigError, r"policy\._target_ is 'policies\.actor_critic.*use policy=soft_actor"),
        (
            ["algorithm=rlpd", "algorithm.expert_steps=80", "algorithm.batch_size=4"],
            ConfigError,
            r"demonstration_share is 0\.5, but of the 1 transitions of a block in a batch 0 would be demonstrations",
        ),
        (["data=/nowhere"], CheckpointError, r"data is '/nowhere', but there is no such folder: give <run.dir>"),
    ],
)
def test_bad_input_is_named(tmp_path, words, error, says) -> None:
    with pytest.raises(error, match=says):
        train(small(f"run.dir={tmp_path}", *words))


def test_a_run_of_recorded_transitions_tells_updates_and_takes_no_env_step(straight, tmp_path) -> None:
    summary = train(recorded("iql", straight, f"run.dir={tmp_path}"))
    assert summary["updates"] == 16
    assert "env_steps" not in summary
    rows = metric_rows(tmp_path)
    assert [row["losses/updates"] for row in rows] == [4] * 4
    assert not any("rollout/env_steps" in row for row in rows)


@pytest.mark.parametrize("algorithm", [DAGGER, [*HG_DAGGER, "algorithm.capacity=1000"]], ids=["dagger", "hg_dagger"])
def test_dagger_learns_what_the_expert_does(tmp_path, algorithm: list[str]) -> None:
    words = ["algorithm.updates_per_step=1", "algorithm.lr=3e-3", "run.num_iterations=15", "eval.num_episodes=20"]
    found = train(reach(f"run.dir={tmp_path}", *algorithm, *words, "env.horizon=20", "policy.options.hidden_size=32"))
    assert found["before"]["success_once"] < 0.3
    assert found["after"]["success_once"] > 0.8
    kept = metric_rows(tmp_path)[-1]["rollout/replay_size"]
    assert 40 <= kept < found["env_steps"]  # of HG-DAgger the human's transitions, of DAgger as many as fit in


def test_a_vla_learns_by_dagger_from_images_that_are_kept_as_bytes(tmp_path) -> None:
    network = ["hidden_size=32", "num_layers=1", "num_heads=2", "stem_width=16", "keypoints=4", "num_bins=9"]
    words = ["policy=tiny_vla", "env.cameras=[base_camera]", "env.obs_size=16", "warm_start.from_scratch=true"]
    options = [f"policy.options.{option}" for option in network]
    train(reach(f"run.dir={tmp_path}", *DAGGER, *words, *options, "algorithm.lr=3e-3"))
    losses = [row["losses/imitation_loss"] for row in metric_rows(tmp_path) if row["losses/updates"]]
    assert losses[-1] < losses[0]
    held = load_tensors(tmp_path / "checkpoints/latest", "replay")
    assert {t.dtype for name, t in held.items() if name.endswith("images.base_camera")} == {torch.uint8}
