"""What an env executes of the chunks that a policy predicts: late, averaged, or drawn to the chunk before.

    steps t ... t + d - 1          what is left of the chunk before, while the policy computes from what step t showed
    steps t + d ... t + E - 1      its chunk, from the action number d on; then the policy sees what step t + E shows
    actions E ... C - 1            what is left of it

An episode's first chunk is never late: the robot waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig, PrefixSchedule
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.randomness import uniform


def prefix_weights(schedule: PrefixSchedule, start: Tensor, end: int, total: int) -> Tensor:
    """Returns how much each action of N chunks is drawn to what is left of the chunk before, float32 [N, total].

    Of the first `start`, int64 [N], it is 1: they are executed before the chunk arrives.  From `end` on, where nothing
    is left, it is 0 (real-time chunking, arXiv:2506.07339, as in LeRobot).
    """
    places, end = torch.arange(total, device=start.device), min(end, total)
    first = start.clamp(max=end)[:, None]
    if schedule is PrefixSchedule.ones:
        return (places < end).float().expand(len(start), -1)
    if schedule in (PrefixSchedule.off, PrefixSchedule.zeros):
        return (places < first).float() * (schedule is PrefixSchedule.zeros)
    line = ((end - places) / (end - first + 1)).clamp(0.0, 1.0)
    return line if schedule is PrefixSchedule.linear else line * torch.expm1(line) / (math.e - 1.0)


class ActionChunks:
    """The chunks of N rows, whose episodes begin one by one."""

    def __init__(self, env: EnvConfig, spec: EnvSpec, ensemble: float | None = None) -> None:
        """With `ensemble`=m predictions of a step are averaged, the oldest weighs most: see EvalConfig."""
        self._env, self._executed, self._ensemble = env, spec.executed, ensemble
        self._left = torch.zeros(spec.num_envs, spec.chunk, spec.action_dim)  # the next step's action first
        self._count = torch.zeros(spec.num_envs, spec.chunk, dtype=torch.long)  # predictions of it; 0: nothing is left
        self._delay = torch.zeros(spec.num_envs, dtype=torch.long)
        self._keys: tuple[int | np.ndarray, ...] = ()
        self._calls = 0

    def begin(self, *keys: int | np.ndarray) -> None:
        """Forgets all rows; delays are drawn by these keys from now on, numbers or one for each row."""
        self._keys, self._calls = keys, 0
        self.forget(range(len(self._left)))

    def forget(self, rows: Sequence[int]) -> None:
        """Leaves nothing of the last chunk in rows whose episodes ended."""
        self._left[list(rows)], self._count[list(rows)] = 0.0, 0

    def shown(self, observation: Observation) -> Observation:
        """Returns an observation with what the policy knows when it begins to compute; draws how long that takes."""
        env, how, device = self._env, self._env.perturb, observation.proprio.device
        self._left, self._count = self._left.to(device), self._count.to(device)
        drawn = uniform(how.seed, "inference delay", *self._keys, self._calls) * (how.inference_jitter + 1)
        is_left = self._count[:, 0] > 0
        late = torch.from_numpy(drawn).floor().long().to(device) + how.inference_delay
        self._delay, self._calls = torch.where(is_left, late, 0), self._calls + 1
        weights = prefix_weights(env.rtc, self._delay, env.chunk - self._executed, env.chunk) * is_left[:, None]
        return replace(observation, pending={"actions": self._left, "weights": weights, "delay": self._delay})

    def executed(self, chunk: Tensor) -> Tensor:
        """Returns what is executed of chunks [N, C, A]: its first E actions are."""
        count, executed = self._count, self._executed
        late = torch.arange(chunk.shape[1], device=chunk.device) < self._delay[:, None]
        made, number = chunk, torch.ones_like(count)
        if self._ensemble is not None:
            weights = torch.exp(-self._ensemble * torch.arange(chunk.shape[1] + 1, device=chunk.device))
            old = (weights.cumsum(0) - weights)[count]  # of all predictions so far
            share = (weights[count] / (old + weights[count]))[..., None]
            made, number = torch.lerp(self._left, chunk, share), count + 1
        made, number = torch.where(late[..., None], self._left, made), torch.where(late, count, number)
        self._left, self._count = torch.zeros_like(made), torch.zeros_like(count)
        self._left[:, :-executed], self._count[:, :-executed] = made[:, executed:], number[:, executed:]
        return made
