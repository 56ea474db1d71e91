"""What a policy folder says about the conditions of its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlinf_embodied.config import EnvConfig, PolicyConfig
from rlinf_embodied.embodied.policy_folder import PHYSICS, differences, fingerprint, require_conditions, save_policy
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.policies import Policy

ENV, POLICY = EnvConfig(), PolicyConfig()


class Saved:
    """A policy that writes as much as makes a policy folder."""

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


def made_on(device: str, folder: Path, env: EnvConfig = ENV) -> Path:
    save_policy(cast(Policy, Saved()), folder, env, POLICY, device)
    return folder


def test_fingerprints_name_every_difference() -> None:
    trained = fingerprint(ENV, POLICY, "cpu") | {"camera_fov": 0.8, "version of x": "1"}
    assert differences(trained, dict(trained)) == []
    assert differences(trained, trained | {"obs_size": 128, "camera_fov": None, "version of x": "2"}) == [
        "obs_size is 64 there and 128 here",
        "camera_fov is 0.8 there and None here",
        "version of x is '1' there and '2' here",
    ]


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        (ENV, "cuda", ["backend is 'physx_cpu' there and 'physx_cuda' here", "decimate is True there and False here"]),
        (replace(ENV, options={"backend": "batched"}), "cuda", []),
        (replace(ENV, options={"backend": "stock"}), "cpu", []),  # the CPU's routes have equal bits
        (ENV, "npu", []),  # PhysX does not run there
        (replace(ENV, options={"decimate": False}), "cpu", ["decimate is True there and False here"]),
        (replace(ENV, options={"show_goal": True}), "cpu", ["show_goal is False there and True here"]),
        (replace(ENV, options={"goal_in_proprio": False}), "cpu", ["goal_in_proprio is True there and False here"]),
        (replace(ENV, options={"control_mode": "a"}), "cpu", ["control_mode is 'pd_ee_delta_pose' there and 'a' here"]),
    ],
)
def test_simulations_of_one_task_are_distinguished(env: EnvConfig, kind: str, says: list[str]) -> None:
    assert differences(fingerprint(ENV, POLICY, "cpu"), fingerprint(env, POLICY, kind)) == says


def test_a_run_resumes_in_the_simulation_of_its_policy_and_may_start_from_one_of_another(tmp_path) -> None:
    for device, there in (("cpu", "cuda"), ("cuda:0", "cpu")):
        folder = made_on(device, tmp_path / there)
        require_conditions("resume", folder, ENV, POLICY, device.partition(":")[0])
        with pytest.raises(CheckpointError, match=r"resume is .*backend is 'physx_.* there and 'physx_.*' here"):
            require_conditions("resume", folder, ENV, POLICY, there)
        require_conditions("warm_start.checkpoint", folder, ENV, POLICY, there, PHYSICS)
