"""A batched env changes its own objects: ManiSkill's classes, modules and other envs stay as they are."""

from __future__ import annotations

import sys
import threading
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType

import pytest
import torch

pytestmark = pytest.mark.sim

LIBRARIES = ("mani_skill", "sapien")


def _functions() -> dict[tuple[str, str, str], object]:
    """Everything that can be called in ManiSkill's and SAPIEN's modules and classes, and in torch itself."""
    plain = (FunctionType, BuiltinFunctionType)
    found: dict = {("torch", "", name): value for name, value in vars(torch).items() if isinstance(value, plain)}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in LIBRARIES:
            continue
        for name, value in list(vars(module).items()):
            if callable(value):
                found[module_name, "", name] = value
            if isinstance(value, type) and value.__module__.split(".")[0] in LIBRARIES:
                found |= {(value.__module__, value.__qualname__, n): v for n, v in vars(value).items()}
    return {
        key: value for key, value in found.items() if not key[2].startswith(("__abstract", "_abc", "__dict", "__weak"))
    }


def _home(value: object) -> str:
    """The module whose source a function was written in, through what wraps it."""
    for attribute in ("func", "fget", "__func__"):
        value = getattr(value, attribute, value) if isinstance(value, partial | cached_property | property) else value
    return getattr(value, "__globals__", {}).get("__name__", "")


def _changed(before: dict, after: dict) -> list[tuple[str, str, str]]:
    return [key for key, value in before.items() if after.get(key) is not value]


def test_no_function_of_maniskill_is_replaced_before_during_and_after_a_batched_env() -> None:
    import mani_skill.envs  # noqa: F401  registers the tasks

    from envs.batched.build import make_batched_task
    from envs.batched.rotations import few_operations

    before = _functions()
    assert len(before) > 5000
    assert [key for key, value in before.items() if _home(value).startswith(("envs", "rlinf"))] == []  # by the import
    env = make_batched_task("PickCube-v1", 2, False, obs_mode="state", control_mode="pd_ee_delta_pose")
    env.begin([0, 1], [1, 2])
    env.advance(torch.zeros(2, 7), [0, 1])
    env.get_obs(env.get_info())
    assert _changed(before, _functions()) == []
    with few_operations():  # the one exception, while a batched env computes
        inside = _changed(before, _functions())
        with few_operations():
            pass
        assert _changed(before, _functions()) == inside
        assert ("mani_skill.utils.structs.pose", "Pose", "__mul__") in inside
    env.close()
    assert _changed(before, _functions()) == []


def test_functions_are_put_back_after_an_error_and_by_the_last_of_two_threads() -> None:
    from mani_skill.utils.structs import Pose

    from envs.batched.rotations import few_operations

    stock = Pose.inv
    with pytest.raises(ZeroDivisionError), few_operations():
        raise ZeroDivisionError
    assert Pose.inv is stock
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with few_operations():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with few_operations():
        thread.start()
        assert entered.wait(10)
    assert Pose.inv is not stock
    leave.set()
    thread.join()
    assert Pose.inv is stock


def test_merged_links_that_only_the_task_knows_have_rows() -> None:
    from mani_skill.envs.tasks.tabletop.pick_cube import PickCubeEnv
    from mani_skill.utils.registration import REGISTERED_ENVS, register_env
    from mani_skill.utils.structs import Link

    from envs.batched.build import make_batched_task
    from envs.batched.scene import structs_of

    class Merging(PickCubeEnv):
        def _load_scene(self, options: dict) -> None:
            super()._load_scene(options)
            self.wrist = {"nested": [Link.merge([self.agent.robot.links_map["panda_link7"]], "wrist")]}

        def evaluate(self) -> dict:
            return {**super().evaluate(), "height": self.wrist["nested"][0].pose.p[:, 2]}

    register_env("MergingCube-v1", max_episode_steps=10)(Merging)
    try:
        env = make_batched_task("MergingCube-v1", 2, False)
        assert any(struct is env.wrist["nested"][0] for struct in structs_of(env))
        height = env.agent.robot.links_map["panda_link7"].pose.p[:, 2]
        assert torch.equal(env.get_info()["height"], height)
        assert height.min() > 0.05
        env.close()
    finally:
        del REGISTERED_ENVS["MergingCube-v1"]
