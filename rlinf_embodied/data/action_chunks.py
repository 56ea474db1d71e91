"""The actions that an env executes of predicted chunks: delayed by d steps, averaged, or guided by the previous chunk.

    steps t ... t + d - 1        the rest of the previous chunk, while the policy computes from what it observed at t
    steps t + d ... t + E - 1    the new chunk from action d on; then the policy observes step t + E
    actions E ... C - 1          the rest of the new chunk

An episode's first chunk is never delayed: the robot waits for it.
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
    """Returns the weight of the guidance by the rest of the previous chunk, for each action: float32 [N, total].

    It is 1 for the first `start` (int64 [N]) actions, which are executed before the chunk arrives, and 0 from `end` on,
    where the previous chunk has no action left (real-time chunking, arXiv:2506.07339, as in LeRobot).
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
    """The running chunks of N rows, whose episodes begin at different times."""

    def __init__(self, env: EnvConfig, spec: EnvSpec, ensemble: float | None = None) -> None:
        """`ensemble`: average all predictions of a step, older ones with larger weights (EvalConfig)."""
        self._env, self._executed, self._ensemble = env, spec.executed, ensemble
        self._left = torch.zeros(spec.num_envs, spec.chunk, spec.action_dim)  # rest of the chunk, next action first
        self._count = torch.zeros(spec.num_envs, spec.chunk, dtype=torch.long)  # predictions of it; 0: no action left
        self._delay = torch.zeros(spec.num_envs, dtype=torch.long)
        self._keys: tuple[int | np.ndarray, ...] = ()
        self._calls = 0

    def begin(self, *keys: int | np.ndarray) -> None:
        """Forgets all rows and sets the keys of the drawn delays: numbers, or arrays with an entry per row."""
        self._keys, self._calls = keys, 0
        self.forget(range(len(self._left)))

    def forget(self, rows: Sequence[int]) -> None:
        """Drops the rest of the last chunk in rows whose episodes ended."""
        self._left[list(rows)], self._count[list(rows)] = 0.0, 0

    def shown(self, observation: Observation) -> Observation:
        """Returns the observation with the pending actions, their guidance weights and the delay, which it draws."""
        env, perturb, device = self._env, self._env.perturb, observation.proprio.device
        self._left, self._count = self._left.to(device), self._count.to(device)
        drawn = uniform(perturb.seed, "inference delay", *self._keys, self._calls) * (perturb.inference_jitter + 1)
        has_rest = self._count[:, 0] > 0
        delay = torch.from_numpy(drawn).floor().long().to(device) + perturb.inference_delay
        self._delay, self._calls = torch.where(has_rest, delay, 0), self._calls + 1
        weights = prefix_weights(env.rtc, self._delay, env.chunk - self._executed, env.chunk) * has_rest[:, None]
        return replace(observation, pending={"actions": self._left, "weights": weights, "delay": self._delay})

    def executed(self, chunk: Tensor) -> Tensor:
        """Returns chunks [N, C, A] whose first E actions are executed, from predicted chunks [N, C, A]."""
        count, executed = self._count, self._executed
        is_late = torch.arange(chunk.shape[1], device=chunk.device) < self._delay[:, None]
        actions, number = chunk, torch.ones_like(count)
        if self._ensemble is not None:
            weights = torch.exp(-self._ensemble * torch.arange(chunk.shape[1] + 1, device=chunk.device))
            old = (weights.cumsum(0) - weights)[count]  # weight of all predictions so far
            share = (weights[count] / (old + weights[count]))[..., None]
            actions, number = torch.lerp(self._left, chunk, share), count + 1
        actions = torch.where(is_late[..., None], self._left, actions)
        number = torch.where(is_late, count, number)
        self._left, self._count = torch.zeros_like(actions), torch.zeros_like(count)
        self._left[:, :-executed], self._count[:, :-executed] = actions[:, executed:], number[:, executed:]
        return actions
