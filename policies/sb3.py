"""A policy saved by Stable-Baselines3 (model.save), for evaluations only.

The zip contains the policy's class and the spaces; any algorithm whose policy has `predict` works (PPO, A2C, SAC, TD3,
DDPG, DQN).  VecNormalize statistics are read from vecnormalize.pkl in the zip's folder, if it exists.  Both files
contain pickles, which can execute code: only open files that you trust.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor, nn

from policies.acting import ActingPolicy
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS, EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features, Noise, PolicyOutput, PolicySpec

NORMALISER = "vecnormalize.pkl"  # in the folder of the zip, as RL Baselines3 Zoo names it
_ACTION = "give a file that model.save(...) of Stable-Baselines3 wrote"


class StableBaselinesPolicy(ActingPolicy):
    """SB3's greedy actions; features are the parts of the policy's observation space."""

    reads_published = True

    def __init__(self, policy: BasePolicy, normaliser: VecNormalize | None, path: Path) -> None:
        """Takes the policy, its observation statistics, and its path for error messages."""
        self._policy, self._normaliser, self._path = policy.eval(), normaliser, path
        self.module: nn.Module = policy
        self.source = f"{path} is a policy of Stable-Baselines3"
        space = policy.action_space
        if not isinstance(space, spaces.Box | spaces.Discrete):
            raise CheckpointError(
                f"checkpoint is {str(path)!r}, whose actions are {space}, but only Box and Discrete are supported"
            )
        self._space = space
        size = int(space.n) if isinstance(space, spaces.Discrete) else int(np.prod(space.shape))
        self.spec = PolicySpec("sb3", 1, size, 1, Noise((1,)))

    def encode(self, observation: Observation) -> Features:
        """Returns the parts of the policy's observation space, by name.

        Raises:
            CheckpointError: the env's observations lack a part.
        """
        wanted = self._policy.observation_space
        parts = wanted.spaces if isinstance(wanted, spaces.Dict) else {"": wanted}
        return {name: self._part(name, space, observation) for name, space in parts.items()}

    def _part(self, name: str, space: spaces.Space, observation: Observation) -> Tensor:
        shape = tuple(space.shape or ())
        state = observation.privileged
        known = {"proprio": observation.proprio, "state": None if state is None else state[:, :-CLOCK_COLUMNS]}
        if images := list(observation.images.values()):
            known["image"] = images[0]
            known["image, channels first"] = images[0].permute(0, 3, 1, 2)
        for kind, value in known.items():
            if value is not None and tuple(value.shape[1:]) == shape and name in ("", kind.split(",")[0]):
                return value
        available = {kind: list(value.shape[1:]) for kind, value in known.items() if value is not None}
        raise CheckpointError(
            f"checkpoint is {str(self._path)!r}, whose policy sees {name or 'an observation'} of shape {list(shape)}, "
            f"but the env shows {available}: choose the env that it was trained in (env=..., env.cameras, env.obs_size)"
        )

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Returns greedy actions, mapped from the policy's bounds to [-1, 1]; log-probs, which are not used, are 0."""
        inputs: Any = {name: value.cpu().numpy() for name, value in features.items()}
        inputs = inputs.get("", inputs)
        if self._normaliser is not None:
            inputs = self._normaliser.normalize_obs(inputs)
        choices, _ = self._policy.predict(inputs, deterministic=True)
        actions = torch.from_numpy(self._mapped(np.asarray(choices)))[:, None]
        return PolicyOutput(actions, {"actions": actions}, torch.zeros(len(actions), 1, 1))

    def _mapped(self, choices: np.ndarray) -> np.ndarray:
        if isinstance(self._space, spaces.Discrete):
            return np.eye(self.spec.action_dim, dtype=np.float32)[choices.reshape(-1) - int(self._space.start)] * 2 - 1
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (self._space.low, self._space.high))
        return ((choices.reshape(len(choices), -1) - low) / (high - low) * 2 - 1).astype(np.float32)

    @classmethod
    def from_folder(
        cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None
    ) -> StableBaselinesPolicy:
        """Returns the policy of a zip.

        Raises:
            CheckpointError: the file is missing, damaged, or no model of SB3's.
        """
        try:
            data, parameters, _ = load_from_zip_file(folder, device="cpu")
            assert data is not None
            kwargs = ({"use_sde": True} if data.get("use_sde") else {}) | data.get("policy_kwargs", {})
            policy = data["policy_class"](data["observation_space"], data["action_space"], lambda _: 0.0, **kwargs)
            policy.load_state_dict(parameters["policy"])
        except (OSError, ValueError, KeyError, TypeError, AssertionError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint is {str(folder)!r}, but {error!r}: {_ACTION}") from error
        return cls(policy, _normaliser(folder.parent / NORMALISER), folder)


def _normaliser(path: Path) -> VecNormalize | None:
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            normaliser = pickle.load(file)
        if not isinstance(normaliser, VecNormalize):
            raise TypeError(f"it holds a {type(normaliser).__name__}")
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): save it by VecNormalize.save, or remove it"
        ) from error
    normaliser.training = False
    return normaliser
