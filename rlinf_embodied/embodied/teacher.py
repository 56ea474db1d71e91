"""A trained policy on the simulator's state that replaces the scripted expert."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_embodied.embodied.policy_folder import load_policy, trained_under
from rlinf_embodied.embodied.warm_start_source import TEACHER
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.envs import VectorEnv


class Teacher:
    """Answers the state of any sub-step with the first action of its chunk: greedy, and closed-loop."""

    def __init__(self, folder: str, env: VectorEnv, device: str, named: str = TEACHER) -> None:
        """Loads the policy; `named` is the config path that gave the folder, for errors.

        Raises:
            CheckpointError: it was trained on another state than the one that `env` shows.
        """
        self._policy = load_policy(trained_under(folder).policy, folder, device).policy
        self._device = device
        state = env.state().privileged
        size = 0 if state is None else state.shape[1]
        theirs = getattr(self._policy, "env", env.spec)  # policies of this project know theirs
        if (theirs.privileged_dim, theirs.action_dim) != (size, env.spec.action_dim):
            raise CheckpointError(
                f"{named} is {folder!r}, whose state and actions have {theirs.privileged_dim} and "
                f"{theirs.action_dim} dimensions, but those of this env have {size} and {env.spec.action_dim}: "
                "train it on the same env"
            )

    @torch.no_grad()
    def actions(self, env: VectorEnv) -> Tensor:
        """Returns the next action of every row, float32 [N, A]."""
        features = self._policy.encode(env.state().to(self._device))
        return self._policy.act(features, None, 1.0).actions[:, 0]
