"""Named features through env, rollout, replay and learner: two cameras of different sizes and two state vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import tiny, train
from two_views import SIZES, make_env

from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig, TrainConfig
from rlinf_embodied.embodied.policy_folder import load_policy, require_fitting
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import FeatureKind, Observation

SECTION = Path(__file__).resolve().parents[1] / "two_views.yaml"


def views(*overrides: str) -> TrainConfig:
    return tiny(f"env={SECTION}", *overrides)


def section(*overrides: str) -> EnvConfig:
    return compose_evaluate([f"env={SECTION}", "policy=random", *overrides]).env


def test_helpers_keep_every_feature_with_its_size_and_order() -> None:
    seen = make_env(section(), 3).reset([1, 2, 3])
    assert {name: tuple(images.shape) for name, images in seen.images.items()} == {
        "front": (3, 16, 24, 3),
        "wrist": (3, 12, 12, 3),
    }
    assert torch.equal(seen.proprio, torch.cat([seen.state["tip"], seen.state["target"]], 1))
    back = Observation.concatenate([seen.rows([2, 0]), seen.rows(slice(1, 2))]).rows([1, 2, 0]).to("cpu")
    assert list(back.images) == ["front", "wrist"]
    for name, images in seen.images.items():
        assert torch.equal(back.images[name], images)
    moved = seen.with_proprio(seen.proprio + 1.0)
    assert torch.equal(moved.state["target"], seen.state["target"] + 1.0)
    assert not seen.without_images().images


def test_states_are_chosen_by_name_in_the_policys_order() -> None:
    env = make_env(section("env.states=[target,tip]", "env.cameras=[wrist]"), 2)
    assert [str(feature) for feature in env.spec.features] == [
        "image wrist [12, 12, 3]",
        "state target [3]",
        "state tip [2]",
        "privileged privileged [8]",
    ]
    assert list(env.reset([1, 2]).state) == ["target", "tip"]
    with pytest.raises(ConfigError, match=r"env\.states is 'elbow', but the state vectors of TwoViews-v0 are tip, tar"):
        make_env(section("env.states=[elbow]"), 1)


def test_a_run_saves_what_its_policy_reads_and_another_env_is_refused(tmp_path) -> None:
    config = views(f"run.dir={tmp_path}", "run.num_iterations=1")
    train(config)
    folder = tmp_path / "checkpoints/latest"
    policy = load_policy(config.policy, str(folder), "cpu").policy
    env = make_env(config.env, 1)
    assert policy.env.features == env.spec.features  # pyright: ignore[reportAttributeAccessIssue]
    assert [f.shape[:2] for f in policy.env.of_kind(FeatureKind.image)] == list(SIZES.values())  # pyright: ignore
    shown = env.reset([1])
    require_fitting(str(folder), shown, criticised=True)
    other = replace(shown, privileged=torch.zeros(1, 3))
    require_fitting(str(folder), other)  # an image policy acts without it
    with pytest.raises(CheckpointError, match=r"'privileged': .*but this env shows .*'privileged': \[3\]"):
        require_fitting(str(folder), other, criticised=True)
    for change, there, here in (
        ("env.states=[target,tip]", r"'tip': \[2\], 'target': \[3\]", r"'target': \[3\], 'tip': \[2\]"),
        ("env.cameras=[wrist,front]", r"'image 0': \[16, 24, 3\]", r"'image 0': \[12, 12, 3\]"),
    ):
        with pytest.raises(CheckpointError, match=f"{there}.*but this env shows .*{here}"):
            require_fitting(str(folder), make_env(section(change), 1).reset([1]))
