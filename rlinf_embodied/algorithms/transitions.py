"""Transitions as named columns: collected by the env stage, stored in the replay buffer, read by algorithms.

    state           float32 [M, P]            concatenated state vectors of the observation
    action          float32 [M, A]            executed action, in [-1, 1]
    reward          float32 [M]               of the step
    next_state      float32 [M, P]            the same after the step, before any reset
    terminated      float32 [M]               1 where the task ended the episode; 0 where it continues or is truncated
    expert_action   float32 [M, A]            the scripted expert's action in this state
    is_intervention float32 [M]               1 where a human acted in place of the policy (LeRobot's name)
    outcome         float32 [M]               1 where the episode ended in success, -1 where it ended in failure, else 0
    privileged      float32 [M, Q]            the simulator's state before the step
    images.<camera> uint8 [M, H, W, 3]        image of a camera
    instruction     uint8 [M, 256]            UTF-8, padded with zeros (envs with cameras)

M transitions of a block are in the order of steps, then rows.  An algorithm lists the columns that it needs, and gets
them for all U updates of an iteration, [U, R, ...]; if it learns from returns also "return", see `episode_returns`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from rlinf_embodied.config import AlgorithmConfig, Critic, EnvConfig, Source, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import PROPRIO, Observation
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import Learner, Step

Columns = dict[str, Tensor]  # all of the same length M

STATE, ACTION, REWARD, NEXT_STATE, TERMINATED = "state", "action", "reward", "next_state", "terminated"
EXPERT_ACTION, IMAGES, INSTRUCTION = "expert_action", "images.", "instruction"
IS_INTERVENTION, OUTCOME, RETURN = "is_intervention", "outcome", "return"
_TEXT = 256  # bytes


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """When an algorithm with a replay buffer trains, and on how much data."""

    rows: int  # transitions of a block in a batch
    demonstration_rows: int  # number of demonstrations among them, while both kinds exist
    updates: int  # in an iteration that trains
    steps: int  # env steps of an iteration over all rows
    expert_iterations: int  # iterations in which the scripted expert acts
    first_update: int  # the first iteration that trains


@dataclass(kw_only=True, slots=True)
class ReplayConfig(AlgorithmConfig):
    """Settings of algorithms that learn from transitions."""

    learns_from = Source.transitions
    columns = (STATE, ACTION, REWARD, NEXT_STATE, TERMINATED)
    policy_method = "sample"
    sees_images: ClassVar[bool] = False  # whether transitions hold images where the env has cameras
    has_returns: ClassVar[bool] = False  # whether it learns from the returns of finished episodes
    mixes: ClassVar[bool] = False  # whether demonstrations are a share of each batch
    tolerance: ClassVar[float] = math.inf  # the expert acts if the policy's action differs from its own by more

    batch_size: int = 256  # transitions per update, an equal part of every block
    capacity: int = 1_000_000  # transitions over all blocks; the oldest ones are overwritten
    expert_steps: int = 0  # env steps of the scripted expert before all else
    demonstration_share: float = 0.5  # of a batch, while there are demonstrations
    warmup_steps: int = 1_000  # env steps of uniform actions before the first update, rounded up to whole iterations
    updates_per_step: float = 1.0  # updates per env step
    updates_per_iteration: int = 500  # if nothing acts, and training is on `data` only

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        require_numbers(self, "algorithm", "batch_size", "capacity", "updates_per_iteration", low=1)
        require_numbers(self, "algorithm", "updates_per_step", low=0, above=True)
        require_numbers(self, "algorithm", "warmup_steps", "expert_steps")
        require_numbers(self, "algorithm", "demonstration_share", high=1)

    def schedule(self, env: EnvConfig) -> ReplaySchedule:
        """Returns the schedule with an env."""
        rows, steps = self.batch_size // env.num_blocks, env.num_envs * env.chunks_per_rollout
        expert, first = -(-self.expert_steps // steps), 0
        updates = self.updates_per_iteration
        if self.acts:
            first = expert + -(-self.warmup_steps // steps)
            updates = max(1, round(self.updates_per_step * steps))
        return ReplaySchedule(rows, round(rows * self.demonstration_share), updates, steps, expert, first)

    def all_columns(self, config: TrainConfig) -> tuple[str, ...]:
        """Returns the columns that the algorithm needs, including those of the policy's observations."""
        return (*self.columns, *seen_columns(config.env.cameras))

    def bootstraps(self, critic: Critic) -> bool:
        return True  # transitions do not record truncation

    def typical_iteration(self, env: EnvConfig) -> int:
        return self.schedule(env).first_update

    def check(self, config: TrainConfig) -> None:
        env = config.env
        require(env.chunk == 1, "env.chunk", env.chunk, "a transition is one env step", "use env.chunk=1")
        rule = "every row steps in every chunk-step, so that updates per env step mean something"
        require(env.auto_reset, "env.auto_reset", env.auto_reset, rule, "set env.auto_reset=true")
        rule = f"the critics of {self.name} see a state, not images"
        require(self.sees_images or not env.cameras, "env.cameras", list(env.cameras), rule, "use env.cameras=[]")
        for name in ("batch_size", "capacity"):
            value = getattr(self, name)
            rule = f"each of the env.num_envs / env.block_size = {env.num_blocks} blocks holds an equal part"
            action = f"use {max(1, value // env.num_blocks) * env.num_blocks}"
            require(value % env.num_blocks == 0, f"algorithm.{name}", value, rule, action)
        gathered = env.num_envs * env.chunks_per_rollout
        rule = f"an iteration gathers env.num_envs x env.chunks_per_rollout = {gathered}"
        require(self.capacity >= gathered, "algorithm.capacity", self.capacity, rule, "use at least that")
        temperature, rule = config.policy.temperature, "the objective is about the log-probs of its distribution"
        require(temperature == 1 or self.sees_images, "policy.temperature", temperature, rule, "use 1.0")
        self._check_data(env, config.files, config.data)

    def _check_data(self, env: EnvConfig, files: Sequence[str], data: str | None) -> None:
        """Checks that there is a source of data, and that batches can mix in demonstrations."""
        rule, action = f"{self.name} learns from recorded transitions", "give data=<run.dir>/checkpoints/latest"
        require(self.acts or bool(files), "data", data, rule, action)
        steps, rule = self.expert_steps, f"data={data} holds the demonstrations"
        require(not (steps and files), "algorithm.expert_steps", steps, rule, "use 0, or leave data out")
        plan, share = self.schedule(env), self.demonstration_share
        mixed = self.mixes and (steps > 0 or bool(files)) and 0 < share < 1
        rule = f"of the {plan.rows} transitions of a block in a batch {plan.demonstration_rows} would be demonstrations"
        action = "use a larger algorithm.batch_size or env.block_size, or a share of 0 or 1"
        holds = not mixed or 0 < plan.demonstration_rows < plan.rows
        require(holds, "algorithm.demonstration_share", share, rule, action)


def length(columns: Columns) -> int:
    """Returns M."""
    return len(next(iter(columns.values())))


def text_column(texts: Sequence[str]) -> Tensor:
    """Returns instructions as bytes, uint8 [M, 256]; longer ones are truncated."""
    rows = [list(text.encode()[:_TEXT]) for text in texts]
    return torch.tensor([row + [0] * (_TEXT - len(row)) for row in rows], dtype=torch.uint8)


def seen_columns(cameras: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns that a policy with these cameras needs in addition to the state."""
    return (*(IMAGES + camera for camera in cameras), INSTRUCTION) if cameras else ()


def observation_of(columns: Columns) -> Observation:
    """Returns the policy's observations from the columns of a batch; state vectors are concatenated."""
    states = columns[STATE]
    texts: tuple[str, ...] = ("",) * len(states)
    if INSTRUCTION in columns:
        rows = columns[INSTRUCTION].cpu().tolist()
        texts = tuple(bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows)
    images = {name.removeprefix(IMAGES): column for name, column in columns.items() if name.startswith(IMAGES)}
    return Observation({PROPRIO: states}, texts, images)


def episode_returns(outcomes: Tensor, rows: int, horizon: int) -> Tensor:
    """Returns the return of each transition in [-1, 0], float32 [M]; NaN if the episode has not ended.

    R_t = -(T - t) / horizon if the episode ends in success at env step T, -1 if it ends in failure: equation 5 of
    arXiv:2511.14759, normalised by the longest episode, at which failures are as costly.

    Args:
        outcomes: float32 [M], of the transitions of a block in the order of steps, then rows.
        rows: number of rows of the block.
        horizon: maximum number of env steps of an episode.
    """
    by_step = outcomes.unflatten(0, (-1, rows))
    number = len(by_step)
    step = torch.arange(number)[:, None]
    end = torch.where(by_step == 0, number, step).flip(0).cummin(0).values.flip(0)  # `number`: none yet
    outcome = torch.cat([by_step, by_step.new_full((1, rows), math.nan)]).gather(0, end)
    returns = torch.where(outcome > 0, -(end - step) / horizon, -1.0)
    return torch.where(outcome.isnan(), math.nan, returns).flatten()


def each_update(data: Mapping[int, Columns]) -> Iterator[dict[int, Columns]]:
    """Yields the batch of each update by block, from columns [U, R, ...]."""
    for k in range(length(next(iter(data.values())))):
        yield {block: {name: column[k] for name, column in columns.items()} for block, columns in data.items()}


def step_on(learner: Learner, batch: Mapping[int, Columns], sums: Callable[..., LossSums], *arguments: object) -> Step:
    """Makes a step on a batch, one pass for the blocks that are learned from together: sums(columns, *arguments)."""
    rows = {block: torch.arange(length(columns)) for block, columns in batch.items()}

    def passes(rows: Mapping[int, Tensor]) -> list[Pass]:
        first, *others = (batch[block] for block in rows)
        if others:
            first = {name: torch.cat([column, *(part[name] for part in others)]) for name, column in first.items()}
        return [Pass(float(length(first)), partial(sums, first, *arguments))]

    return learner.step(rows, passes)
