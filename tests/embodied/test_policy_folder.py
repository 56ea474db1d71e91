"""What a policy folder says about the conditions of its training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from rlinf_embodied.config import Backend, EnvConfig, PolicyConfig
from rlinf_embodied.embodied.policy_folder import (
    PHYSICS,
    Fingerprint,
    fingerprint,
    require_conditions,
    save_policy,
    trained_under,
)
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
    trained = Fingerprint(
        "PickCube-v1", "pd_ee_delta_pose", "panda", ("base",), 0.8, 64, 5, 50, 33, "tiny_vla", {"torch": "2", "x": "1"}
    )
    assert trained.differences(replace(trained)) == []
    other = replace(trained, obs_size=128, camera_fov=None, libraries={"torch": "3"})
    assert trained.differences(other) == [
        "camera_fov is 0.8 there and None here",
        "obs_size is 64 there and 128 here",
        "version of torch is '2' there and '3' here",
        "version of x is '1' there and None here",
    ]
    assert trained.differences(replace(trained, observations=2)) == ["observations is 1 there and 2 here"]


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        (ENV, "cuda", ["backend is 'physx_cpu' there and 'physx_cuda' here", "decimate is True there and False here"]),
        (replace(ENV, backend=Backend.batched), "cuda", []),
        (replace(ENV, backend=Backend.stock), "cpu", []),  # the CPU's routes have equal bits
        (ENV, "npu", []),  # PhysX does not run there
        (replace(ENV, decimate=False), "cpu", ["decimate is True there and False here"]),
        (replace(ENV, show_goal=True), "cpu", ["show_goal is False there and True here"]),
        (replace(ENV, goal_in_proprio=False), "cpu", ["goal_in_proprio is True there and False here"]),
        (replace(ENV, control_mode="a"), "cpu", ["control_mode is 'pd_ee_delta_pose' there and 'a' here"]),
    ],
)
def test_simulations_of_one_task_are_told_apart(env: EnvConfig, kind: str, says: list[str]) -> None:
    assert fingerprint(ENV, POLICY, "cpu").differences(fingerprint(env, POLICY, kind)) == says


def test_an_env_of_ones_own_has_one_simulation_on_every_device() -> None:
    own = replace(ENV, _target_="mine.make_env")
    assert fingerprint(own, POLICY, "cpu") == fingerprint(own, POLICY, "cuda")


def test_a_policy_made_on_a_cpu_says_so_on_a_gpu_and_the_other_way_round(tmp_path, caplog) -> None:
    for device, there in (("cpu", "cuda"), ("cuda:0", "cpu")):
        folder = made_on(device, tmp_path / there)
        require_conditions("resume", folder, ENV, POLICY, device.partition(":")[0])
        with pytest.raises(CheckpointError, match=r"resume is .*backend is 'physx_.* there and 'physx_.*' here"):
            require_conditions("resume", folder, ENV, POLICY, there)
        assert not caplog.messages
        require_conditions("warm_start.checkpoint", folder, ENV, POLICY, there, told=PHYSICS)
        (said,) = caplog.messages
        assert "warm_start.checkpoint is" in said
        assert "backend is" in said
        caplog.clear()


def test_a_folder_that_does_not_say_which_simulation_is_of_a_cpu(tmp_path) -> None:
    folder = made_on("cpu", tmp_path, replace(ENV, show_goal=True))
    path = folder / "evaluation.json"
    content = json.loads(path.read_text())
    for name in (*PHYSICS, "show_goal", "goal_in_proprio"):
        del content["fingerprint"][name]
    path.write_text(json.dumps(content))
    found = trained_under(str(folder)).fingerprint
    assert (found.backend, found.decimate, found.show_goal, found.goal_in_proprio) == ("physx_cpu", True, True, True)
