"""An env at a fixed control rate: its rows are robots that step side by side, and a step takes its period.

    call ----> step 0 ......| step 1 ......| step 2 ......| ----> returns
               1/hz          1/hz           1/hz

The clock is the wall's; what the steps give is not touched, so that a run's weights do not depend on the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from rlinf_embodied.interfaces.envs import (
    ChunkResult,
    HasSimulatorStates,
    Observation,
    RunningEpisode,
    VectorEnv,
)


class PacedEnv:
    """A `VectorEnv` whose env steps take at least a period each; all else is the env's own.

    What the env itself computes in a step, images included, counts as part of its period; the rest is slept.
    """

    def __init__(self, env: VectorEnv, control_hz: float) -> None:
        """Takes the env and its control rate in env steps per second, positive."""
        self._env, self._period_s = env, 1.0 / control_hz
        self.spec = env.spec
        self._over_s = 0.0  # when the step under way will be over, by time.monotonic

    def step_chunk(
        self, actions: Tensor | Callable[[int], Tensor], next_seeds: Sequence[int] | None = None
    ) -> ChunkResult:
        """Runs C env steps; returns no earlier than C periods after it was called.  See VectorEnv."""

        def in_time(substep: int) -> Tensor:
            self._sleep()
            self._over_s = time.monotonic() + self._period_s
            return actions[:, substep] if isinstance(actions, Tensor) else actions(substep)

        result = self._env.step_chunk(in_time, next_seeds)
        self._sleep()
        return result

    def _sleep(self) -> None:
        """Returns when the last step is over."""
        while (left_s := self._over_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | None = None) -> Observation:
        return self._env.reset(seeds, rows)

    def running(self) -> list[RunningEpisode | None]:
        return self._env.running()

    def restore(self, episodes: Sequence[RunningEpisode | None]) -> Observation:
        """A replay is as fast as the env can."""
        return self._env.restore(episodes)

    def expert_actions(self) -> Tensor:
        return self._env.expert_actions()

    def state(self) -> Observation:
        return self._env.state()

    def simulator_states(self) -> dict[str, Tensor]:
        return self._env.simulator_states() if isinstance(self._env, HasSimulatorStates) else {}

    def object_positions(self) -> Tensor | None:
        return self._env.object_positions()

    def record(self, rows: Sequence[int], size: int = 256) -> None:
        self._env.record(rows, size)

    def take_frames(self) -> dict[int, list[Tensor]]:
        return self._env.take_frames()

    def close(self) -> None:
        self._env.close()
