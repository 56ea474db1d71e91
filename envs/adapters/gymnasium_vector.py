"""An env of this project as a `gymnasium.vector.VectorEnv`, which resets rows in the step in which they end."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from envs.adapters.single_steps import Seen, Shown, SingleSteps
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import VectorEnv


class GymnasiumVector(gymnasium.vector.VectorEnv):
    """N rows behind Gymnasium's interface: autoreset mode SAME_STEP, final observations in info["final_obs"]."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, env: VectorEnv, observations: Shown | str = Shown.state) -> None:
        """Takes an env whose chunks are of one action, and what of its observations is shown.

        Raises:
            ConfigError: see SingleSteps.
        """
        self._rows = SingleSteps(env, observations)
        self.num_envs = self._rows.num_envs
        self.single_observation_space = self._rows.observation_space
        self.single_action_space = self._rows.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Starts an episode in every row, or in those of options["reset_mask"], bool [N].

        Args:
            seed: of row 0, row i has seed + i; or one per row; None: the next ones.
            options: nothing else is known.

        Raises:
            ConfigError: another number of seeds or entries of the mask than rows.
        """
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))
        given = [seed + row for row in range(self.num_envs)] if isinstance(seed, int | np.integer) else seed
        for name, value in (("options['reset_mask']", mask), ("seed", given)):
            if value is not None and len(value) != self.num_envs:
                raise ConfigError(f"{name} has {len(value)} entries for {self.num_envs} rows: give one per row")
        super().reset(seed=seed if isinstance(seed, int) else None)
        rows = np.flatnonzero(mask).tolist()
        known = None if given is None or any(given[row] is None for row in rows) else [given[row] for row in rows]
        return self._rows.reset(known, rows), {}

    def step(self, actions: np.ndarray) -> tuple[Seen, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Runs one step of all rows; info has final_obs and final_info with its episode, each with its mask.

        The episode stands in final_info alone: RecordEpisodeStatistics refuses an env that tells it beside it.
        """
        stepped, infos = self._rows.step(actions), {}
        for row, end in stepped.ends.items():
            ended: dict[str, Any] = {"episode": {"r": end.metrics["return"], "l": int(end.metrics["episode_len"])}}
            if "success_once" in end.metrics:
                ended["is_success"] = bool(end.metrics["success_once"])
            infos = self._add_info(infos, {"final_obs": stepped.final[row], "final_info": ended}, row)
        return stepped.seen, stepped.rewards, stepped.terminated, stepped.truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self._rows.close()
