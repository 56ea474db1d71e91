"""What a policy folder says about the conditions of its training."""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.embodied.policy_folder import Fingerprint


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
