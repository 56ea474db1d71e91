"""What callers may pass to an env of N rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.errors import ConfigError, SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}  # their internals are relied on
SHOWN = 10  # row numbers in a message


def check_versions() -> None:
    """Raises SimulatorError if the batched backend was not tested with the installed ManiSkill or SAPIEN."""
    for package, tested in TESTED_VERSIONS.items():
        found = version(package)
        if found not in tested:
            raise SimulatorError(
                f"{package} {found} is installed, but the batched CPU backend was tested with {package} "
                f"{' and '.join(tested)} only: install `{package}=={tested[-1]}`, or use stock envs (env.backend=stock)"
            )


def short(rows: Sequence[int]) -> str:
    """Returns row numbers as text, the first ten."""
    shown = ", ".join(str(row) for row in rows[:SHOWN])
    return shown + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")


def check_num_envs(num_envs: int) -> None:
    """Raises ConfigError for a number of rows that is not a whole number above 0."""
    if not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs!r}, but an env has at least one row: give a whole number above 0")


def check_rows(rows: Sequence[int], num_envs: int) -> None:
    """Raises SimulatorError if there are no rows, or one does not exist or comes twice."""
    if not rows or len(set(rows)) != len(rows) or not all(0 <= row < num_envs for row in rows):
        raise SimulatorError(f"reset got rows {list(rows)}: each must be one of 0..{num_envs - 1}, and once")


def chosen_rows(env_idx: Tensor | np.ndarray | Sequence[int] | None, num_envs: int) -> list[int]:
    """Returns the checked row numbers in options["env_idx"]: numbers, a mask bool [N], or None for all."""
    if env_idx is None:
        return list(range(num_envs))
    index = torch.as_tensor(env_idx).reshape(-1)
    rows = (index.nonzero()[:, 0] if index.dtype == torch.bool else index).tolist()
    check_rows(rows, num_envs)
    return rows


def check_finite(actions: Tensor, running: Tensor | None = None) -> None:
    """Raises SimulatorError if actions [N, ...] are not finite in the rows of `running` [N] (default: all)."""
    finite = actions.isfinite()
    if finite.all():
        return
    bad = (~finite).flatten(1).any(1)
    if running is not None:
        bad &= running
    if bad.any():
        raise SimulatorError(
            f"actions of rows {short(bad.nonzero()[:, 0].tolist())} are not finite: nothing was stepped; check the "
            "policy's outputs for NaN"
        )


def check_actions(actions: object, space: gym.Space, num_envs: int) -> None:
    """Raises SimulatorError if actions for `step` have another shape, lack a robot, or are not finite.

    They are an array [N, A] ([A] too for one row), one by robot in a dict, or None.  Where the control mode is switched
    the size of an action is not known yet.
    """
    if actions is None:
        return
    if isinstance(actions, Mapping):
        if "control_mode" in actions:
            return
        robots = dict(space.items()) if isinstance(space, gym.spaces.Dict) else {}
        if set(actions) != set(robots):
            known = ", ".join(robots) or "none: the task has one robot"
            raise SimulatorError(
                f"actions have the keys {sorted(actions)}, but the robots are {known}: give one for each"
            )
        for name, part in actions.items():
            check_actions(part, robots[name], num_envs)
        return
    values = actions if isinstance(actions, Tensor) else torch.as_tensor(np.asarray(actions))
    expected = (num_envs, *(space.shape or ()))
    if tuple(values.shape) != expected and not (num_envs == 1 and values.shape == space.shape):
        raise SimulatorError(
            f"actions have shape {tuple(values.shape)}, but {expected} (rows, dimensions) are needed: nothing was "
            "stepped; give one row of actions per env"
        )
    check_finite(values.reshape(expected))
