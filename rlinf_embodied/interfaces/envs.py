"""What envs give and take: observations, chunks of actions, whole episodes.

Axes: N env rows (B in a block), K cameras, S image size, C actions per chunk, A action dimensions, P proprioception,
Q privileged state.  Every tensor below lives on the device of the env that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# An observation, as every policy of this project sees it:
#   images       uint8    [N, K, S, S, 3]  RGB 0..255, cameras in the order of EnvSpec.cameras; None where not rendered
#                                          (an env without cameras renders nothing)
#   proprio      float32  [N, P]           joint positions, tool pose, goal position and the way from the tool to
#                                          it: what the robot may know (SI units)
#   privileged   float32  [N, Q]           simulator state for a critic or a teacher; the policy that is to leave the
#                                          simulator never reads it; None if there is none.  Its last CLOCK_COLUMNS are
#                                          the time in the episode and the phase within the chunk, in [-1, 1]
#   instruction  N strings                 what to do, in words
CLOCK_COLUMNS = 2  # of privileged state; they depend on env.horizon and env.chunk, all others on the simulator alone
OBSERVATION_VERSION = 3  # raised when images or proprioception of one config change: policies learned from these


@dataclass(frozen=True, slots=True)
class Observation:
    """What N rows of an env show; see the block comment above for keys, dtypes, axes and ranges."""

    proprio: Tensor
    instruction: tuple[str, ...]
    images: Tensor | None = None
    privileged: Tensor | None = None

    def __len__(self) -> int:
        """Returns the number of rows N."""
        return len(self.proprio)

    def rows(self, index: Sequence[int] | slice) -> Observation:
        """Returns the observation of these rows, in this order."""
        picked = range(len(self))[index] if isinstance(index, slice) else index
        take = index if isinstance(index, slice) else torch.as_tensor(list(index), dtype=torch.long)
        return Observation(
            proprio=self.proprio[take],
            instruction=tuple(self.instruction[i] for i in picked),
            images=None if self.images is None else self.images[take],
            privileged=None if self.privileged is None else self.privileged[take],
        )

    def to(self, device: str) -> Observation:
        """Returns the observation on a device."""
        move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
        return Observation(self.proprio.to(device), self.instruction, move(self.images), move(self.privileged))

    def padded(self, size: int) -> Observation:
        """Returns `size` rows, the last one repeated as often as needed (policy calls have fixed sizes)."""
        return self.rows([*range(len(self)), *[len(self) - 1] * (size - len(self))])

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """Returns the rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        join = lambda name: (  # noqa: E731
            None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])
        )
        return Observation(
            proprio=torch.cat([part.proprio for part in parts]),
            instruction=tuple(text for part in parts for text in part.instruction),
            images=join("images"),
            privileged=join("privileged"),
        )


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Plain facts about an env, as EnvSpec("PickCube-v1", 32, 5, 50, 7, 19, 45, 64, ("base_camera",), "cpu")."""

    task: str
    num_envs: int  # N
    chunk: int  # C
    horizon: int  # env steps per episode
    action_dim: int  # A
    proprio_dim: int  # P
    privileged_dim: int  # Q, 0 without
    obs_size: int  # S
    cameras: tuple[str, ...]
    backend: str  # which physics ran, for example "physx_cpu (batched)"
    has_success: bool = True  # whether the task can be solved; where not, its return is what counts
    categorical: bool = False  # an action is the choice of one of A: the largest entry, the others are -1
    execute_steps: int = 0  # how many of a chunk's first actions are executed; 0: all C

    @property
    def executed(self) -> int:
        """Env steps E of a chunk."""
        return self.execute_steps or self.chunk

    @property
    def chunks_per_episode(self) -> int:
        """Chunks of a whole episode; the last one may be cut short by its end."""
        return -(-self.horizon // self.executed)


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """One finished episode: its row, its reset seed, and ManiSkill's episode metrics.

    `metrics` has at least return, episode_len and reward (return / episode_len), and success_once and success_at_end
    where the env has a success; `return` is the sum of the task's own reward, not of the shaped reward that training
    sees.
    """

    row: int
    seed: int
    metrics: Mapping[str, float]
    task: str = ""  # its name, where rows have several


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What the E env steps of a chunk of C actions gave, N rows.

    Sub-steps after an episode's end, and those from E on, are not valid.  A frozen row (ended, not reset) has no valid
    sub-step and is neither stepped nor rendered.  Where `valid` is False the other entries are zero / False.
    """

    rewards: Tensor  # float32 [N, C]
    terminated: Tensor  # bool [N, C], the episode ended in this sub-step by the task's own rule
    truncated: Tensor  # bool [N, C], the episode ended in this sub-step by the time limit (and not by the task)
    valid: Tensor  # bool [N, C]
    success: Tensor  # bool [N, C], the task is solved after this sub-step
    privileged: Tensor | None  # float32 [N, C, Q], simulator state before each action
    final_rows: tuple[int, ...]  # rows whose episode ended in this chunk, ascending
    final_observation: Observation | None  # of final_rows, before any reset; None if there are none
    observation: Observation  # of all N rows, after any reset: what the policy sees next
    episodes: tuple[EpisodeEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    """A running episode as its cause: replaying `actions` [t, A] after a history-free reset with `seed` restores it."""

    seed: int
    actions: Tensor


@runtime_checkable
class HasSimulatorStates(Protocol):
    """An env that tells the physical state of its rows, for recordings; not every VectorEnv does."""

    def simulator_states(self) -> dict[str, Tensor]:
        """Returns the state of all N rows by name, as "actors/cube", each float [N, D]; {} where it is not known."""
        ...


@runtime_checkable
class VectorEnv(Protocol):
    """N rows of one task.  A row is running, or frozen (its episode ended and nobody reset it)."""

    spec: EnvSpec

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | None = None) -> Observation:
        """Starts an episode in each of `rows` (default: all) from its own seed and returns the observation of all rows.

        The episode is a pure function of (seed, actions): nothing that the env ran before has any influence.
        """
        ...

    def step_chunk(
        self, actions: Tensor | Callable[[int], Tensor], next_seeds: Sequence[int] | None = None
    ) -> ChunkResult:
        """Runs the first E = spec.executed steps of a chunk of C actions.

        Args:
            actions: float32 [N, C, A], in [-1, 1] (clipped by the controllers); or a closed-loop controller: a function
                that is called with each sub-step's number just before it runs and returns float32 [N, A].
            next_seeds: one seed per row; a row whose episode ends in this chunk starts the next one with it (partial
                reset, at the end of the chunk).  None: such rows freeze.

        Raises:
            SimulatorError: wrong shape, or actions that are not finite (names the rows; nothing was stepped).
        """
        ...

    def running(self) -> list[RunningEpisode | None]:
        """Returns the running episode of each row, None for frozen rows."""
        ...

    def restore(self, episodes: Sequence[RunningEpisode | None]) -> Observation:
        """Brings every row to the given point by reset and replay (None: frozen); bit-equal on CPU."""
        ...

    def expert_actions(self) -> Tensor:
        """Returns the scripted expert's next single action for every row, float32 [N, A].

        Raises:
            SimulatorError: this task has no expert.
        """
        ...

    def state(self) -> Observation:
        """Returns what all N rows show now, without images: for controllers that are asked within a chunk."""
        ...

    def object_positions(self) -> Tensor | None:
        """Returns where the object to handle is, float32 [N, 3] in metres (a helper target for cloning), or None."""
        ...

    def record(self, rows: Sequence[int], size: int = 256) -> None:
        """From now on keeps one image [size, size, 3] per env step of each of these rows (an empty list ends it)."""
        ...

    def take_frames(self) -> dict[int, list[Tensor]]:
        """Returns the images kept since the last call, uint8 [size, size, 3] by row, and forgets them."""
        ...

    def close(self) -> None: ...
