"""Dotted paths: how configs name what is imported only where it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def load_target(target: str) -> Callable[..., object]:
    """Returns the object at a dotted path, for example "envs.maniskill.ManiSkillEnv" (Hydra's `_target_`)."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)
