"""For which tasks there is a scripted expert: known without importing a simulator."""

from __future__ import annotations

import difflib

from rlinf_embodied.config import EnvConfig

EXPERT_TASKS = ("PickCube-v1", "PushCube-v1", "PullCube-v1", "StackCube-v1")
CONTROL_MODE = "pd_ee_delta_pose"


def why_no_expert(config: EnvConfig) -> str | None:
    """Returns why there is no scripted expert for an env section, None if there is one.

    Robots are not looked at: whether one has an arm with a gripper is known when it is built.
    """
    if config.task not in EXPERT_TASKS:
        close = difflib.get_close_matches(config.task, EXPERT_TASKS, n=1, cutoff=0.9)
        meant = f" (did you mean {close[0]}?)" if close else ""
        return f"env.task is {config.task!r}{meant}, but scripted experts are for {', '.join(EXPERT_TASKS)} only"
    if config.control_mode != CONTROL_MODE:
        return f"env.control_mode is {config.control_mode!r}, but scripted experts act in {CONTROL_MODE} only"
    return None
