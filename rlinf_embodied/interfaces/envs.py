"""The protocol of envs: observations, action chunks, episodes.

Axes: N env rows (B in a block), H and W height and width of an image, C actions per chunk, A action dimensions,
P proprioception, Q privileged state.  Every tensor below is on the device of the env that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlinf_embodied.config.env import Chunking

CLOCK_COLUMNS = 3  # last columns of privileged state, which depend on the episode's settings, not on the simulator
OBSERVATION_VERSION = 3  # incremented if the images or proprioception of a config change, since policies depend on them
PROPRIO = "proprio"  # the state vector of an env that has only one
PRIVILEGED = "privileged"


class FeatureKind(StrEnum):
    """The kind of a feature of an observation."""

    image = "image"  # of a camera: uint8 [H, W, 3], RGB 0..255
    state = "state"  # float32 [D], available to the robot, in SI units: joint positions, tool pose, goal position
    privileged = "privileged"  # float32 [Q], simulator state for a critic or a teacher


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One feature of an observation, for example FeatureSpec("wrist", FeatureKind.image, (48, 64, 3), "uint8").

    With env.history=F > 1 images and state vectors have a leading axis of F env steps, oldest first, as those of
    Gymnasium's FrameStackObservation: F x [H, W, 3], F x [D].
    """

    name: str  # unique within its kind
    kind: FeatureKind
    shape: tuple[int, ...]  # of one row
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name} {list(self.shape)}"


def features_of(
    images: Mapping[str, tuple[int, int]], states: Mapping[str, int], privileged_dim: int = 0, history: int = 1
) -> tuple[FeatureSpec, ...]:
    """Returns the features of cameras, by (height, width), of state vectors and of privileged state, by length."""
    frames = (history,) if history > 1 else ()
    return (
        *(FeatureSpec(name, FeatureKind.image, (*frames, *size, 3), "uint8") for name, size in images.items()),
        *(FeatureSpec(name, FeatureKind.state, (*frames, size)) for name, size in states.items()),
        *([FeatureSpec(PRIVILEGED, FeatureKind.privileged, (privileged_dim,))] if privileged_dim else []),
    )


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation of N rows: features by name, with rows as the first axis; EnvSpec.features describes them.

    Images and state vectors are in the order of EnvSpec.features, which is that of env.cameras and env.states.  With
    env.history=F they are [N, F, H, W, 3] and [N, F, D], the latest step last; a reset repeats its observation F times.
    The last CLOCK_COLUMNS of privileged state, in [-1, 1], determine when an episode ends: its time, the phase within
    the chunk, and the number of env.hold_steps for which the task has been solved.
    """

    state: Mapping[str, Tensor]  # float32 [N, D] each
    instruction: tuple[str, ...]  # N texts
    images: Mapping[str, Tensor] = field(default_factory=dict)  # uint8 [N, H, W, 3] each; {} if nothing is rendered
    privileged: Tensor | None = None  # float32 [N, Q]; not for policies that are to be deployed
    # for overlapping chunks (data/action_chunks.py): the remaining "actions" [N, C, A] of the last chunk, next first,
    # "weights" [N, C] that guide the next chunk to them, and "delay" int64 [N], the steps after which it arrives
    pending: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.instruction)

    @property
    def proprio(self) -> Tensor:
        """All state vectors side by side, float32 [N, P], env step by env step."""
        vectors = list(self.state.values())
        return (vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)).flatten(1)

    def with_proprio(self, proprio: Tensor) -> Observation:
        """Returns the observation with the state vectors replaced by the values [N, P]."""
        vectors = list(self.state.values())
        parts = proprio.unflatten(1, (*vectors[0].shape[1:-1], -1)).split([each.shape[-1] for each in vectors], -1)
        return replace(self, state=dict(zip(self.state, parts, strict=True)))

    def prompted(self, suffix: str | None) -> Observation:
        """Returns the observation with `suffix` appended to every instruction that does not end with it."""
        if not suffix:
            return self
        added = lambda text: text if text.endswith(suffix) else f"{text} {suffix}"  # noqa: E731
        return replace(self, instruction=tuple(map(added, self.instruction)))

    def without_images(self) -> Observation:
        return replace(self, images={})

    def rows(self, index: Sequence[int] | slice) -> Observation:
        """Returns the observation of these rows, in this order."""
        picked = range(len(self))[index] if isinstance(index, slice) else index
        take = index if isinstance(index, slice) else torch.as_tensor(list(index), dtype=torch.long)
        return self._each(lambda tensor: tensor[take], tuple(self.instruction[i] for i in picked))

    def to(self, device: str) -> Observation:
        return self._each(lambda tensor: tensor.to(device), self.instruction)

    def _each(self, change: Callable[[Tensor], Tensor], instruction: tuple[str, ...]) -> Observation:
        changed = lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}  # noqa: E731
        privileged = None if self.privileged is None else change(self.privileged)
        return Observation(changed(self.state), instruction, changed(self.images), privileged, changed(self.pending))

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """Returns the rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        join = lambda group: {k: torch.cat([getattr(p, group)[k] for p in parts]) for k in getattr(parts[0], group)}  # noqa: E731
        privileged = [part.privileged for part in parts if part.privileged is not None]
        texts = tuple(text for part in parts for text in part.instruction)
        joined = torch.cat(privileged) if privileged else None
        return Observation(join("state"), texts, join("images"), joined, join("pending"))


@dataclass(frozen=True, slots=True)
class EnvSpec(Chunking):
    """Static description of an env.

    For example EnvSpec("PickCube-v1", 32, 5, 50, 7, features_of({"base_camera": (64, 64)}, {"proprio": 19}), "cpu").
    """

    task: str
    num_envs: int  # N
    chunk: int  # C
    horizon: int  # env steps per episode
    action_dim: int  # A
    features: tuple[FeatureSpec, ...]  # of an observation
    backend: str  # which physics ran, for example "physx_cpu (batched)"
    has_success: bool = True  # whether the task reports success; otherwise the return is the outcome
    categorical: bool = False  # an action is one of A choices: the largest entry, the others are -1
    execute_steps: int = 0  # number of a chunk's first actions that are executed; 0: all C
    history: int = 1  # F, env steps in images and state vectors

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EnvSpec:
        """Returns the spec whose `asdict` is given, as read from a file."""
        read = lambda f: FeatureSpec(f["name"], FeatureKind(f["kind"]), tuple(f["shape"]), f["dtype"])  # noqa: E731
        return cls(**{**values, "features": tuple(read(feature) for feature in values["features"])})

    def of_kind(self, kind: FeatureKind) -> tuple[FeatureSpec, ...]:
        return tuple(feature for feature in self.features if feature.kind is kind)

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.of_kind(FeatureKind.image))

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's images."""
        return tuple((feature.shape[-3], feature.shape[-2]) for feature in self.of_kind(FeatureKind.image))

    @property
    def proprio_dim(self) -> int:
        """P, of all state vectors and env steps."""
        return sum(math.prod(feature.shape) for feature in self.of_kind(FeatureKind.state))

    @property
    def privileged_dim(self) -> int:
        """Q; 0 without privileged state."""
        return sum(feature.shape[0] for feature in self.of_kind(FeatureKind.privileged))


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """One finished episode: its row, its reset seed, and ManiSkill's episode metrics; light, plain values.

    `metrics` has at least return, episode_len and reward (return / episode_len), and success_once and success_at_end
    if the env reports success.  `return` is the sum of the task's own reward, not of the shaped reward of training.
    """

    row: int
    seed: int
    metrics: Mapping[str, float]
    task: str = ""  # the row's task, if rows have several
    task_instruction: str = ""  # that task's instruction; "" if it is unknown or the policy gets a paraphrase of it


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The result of executing the first E of a chunk of C actions in N rows.

    Sub-steps after an episode's end, and those from E on, are not valid.  A frozen row (ended, not reset) has no valid
    sub-step and is neither stepped nor rendered.  Entries that are not valid are zero or False.
    """

    rewards: Tensor  # float32 [N, C]
    terminated: Tensor  # bool [N, C], the episode ended in this sub-step by the task's own rule
    truncated: Tensor  # bool [N, C], the episode ended in this sub-step by the time limit (and not by the task)
    valid: Tensor  # bool [N, C]
    success: Tensor  # bool [N, C], the task is solved after this sub-step
    privileged: Tensor | None  # float32 [N, C, Q], simulator state before each action
    final_rows: tuple[int, ...]  # rows whose episode ended in this chunk, ascending
    final_observation: Observation | None  # of final_rows, before any reset; None if there are none
    observation: Observation  # of all N rows, after any reset: the input of the next policy call
    episodes: tuple[EpisodeEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    """An unfinished episode: replaying `actions` [t, A] after a history-free reset with `seed` restores it."""

    seed: int
    actions: Tensor


@runtime_checkable
class VectorEnv(Protocol):
    """N rows of one task.  A row is running, or frozen (its episode ended and it was not reset)."""

    spec: EnvSpec

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | None = None) -> Observation:
        """Starts an episode in each of `rows` (default: all) from its seed and returns the observation of all rows.

        The episode is a function of (seed, actions), independent of earlier episodes.
        """
        ...

    def step_chunk(
        self, actions: Tensor | Callable[[int], Tensor], next_seeds: Sequence[int] | None = None
    ) -> ChunkResult:
        """Runs the first E = spec.executed steps of a chunk of C actions.

        Args:
            actions: float32 [N, C, A], in [-1, 1] (clipped by the controllers), or in the env's own units if its
                options say so; or a closed-loop controller: a function that is called with the number of each sub-step
                before it runs and returns float32 [N, A].
            next_seeds: one seed per row; a row whose episode ends in this chunk starts the next one with it (partial
                reset, at the end of the chunk).  None: such rows freeze.

        Raises:
            SimulatorError: wrong shape, or actions that are not finite; the message names the rows, none was stepped.
        """
        ...

    def running(self) -> list[RunningEpisode | None]:
        """Returns the running episode of each row, None for frozen rows."""
        ...

    def restore(self, episodes: Sequence[RunningEpisode | None]) -> Observation:
        """Restores the given episode in every row by reset and replay (None: frozen); bit-equal on CPU."""
        ...

    def expert_actions(self) -> Tensor:
        """Returns the scripted expert's next single action for every row, float32 [N, A].

        Raises:
            SimulatorError: this task has no expert.
        """
        ...

    def state(self) -> Observation:
        """Returns the current observation of all N rows without images, for controllers that act within a chunk."""
        ...

    def object_positions(self) -> Tensor | None:
        """Returns the object's position, float32 [N, 3] in metres (an auxiliary target for cloning), or None."""
        ...

    def record(self, rows: Sequence[int], size: int = 256) -> None:
        """Starts to keep one image [size, size, 3] per env step of each of these rows; an empty list stops it."""
        ...

    def take_frames(self) -> dict[int, list[Tensor]]:
        """Returns the images kept since the last call, uint8 [size, size, 3] by row, and removes them."""
        ...

    def close(self) -> None: ...
