"""What envs give and take: observations, chunks of actions, whole episodes.

Axes: N env rows (B in a block), H and W height and width of an image, C actions per chunk, A action dimensions,
P proprioception, Q privileged state.  Every tensor below lives on the device of the env that made it.
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

CLOCK_COLUMNS = 3  # of privileged state; they depend on how episodes are run, all others on the simulator alone
OBSERVATION_VERSION = 3  # raised when images or proprioception of one config change: policies learned from these
PROPRIO = "proprio"  # the state vector of an env that has only one
PRIVILEGED = "privileged"


class FeatureKind(StrEnum):
    """What a feature of an observation is."""

    image = "image"  # of a camera: uint8 [H, W, 3], RGB 0..255
    state = "state"  # float32 [D], what the robot may know, in SI units: joint positions, tool pose, goal position
    privileged = "privileged"  # float32 [Q], simulator state for a critic or a teacher


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """One feature of an observation, as FeatureSpec("wrist", FeatureKind.image, (48, 64, 3), "uint8").

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
    """What N rows of an env show: its features by name, each with rows first; EnvSpec.features describes them.

    Images and state vectors have the order of EnvSpec.features, that of env.cameras and env.states; with env.history=F
    they are [N, F, H, W, 3] and [N, F, D], the present last, and a reset repeats its observation F times.  The last
    CLOCK_COLUMNS of privileged state are what an episode's end depends on beyond the simulator, in [-1, 1]: its time,
    the phase within the chunk, and for how many of env.hold_steps the task has stayed solved.
    """

    state: Mapping[str, Tensor]  # float32 [N, D] each
    instruction: tuple[str, ...]  # N texts: what to do
    images: Mapping[str, Tensor] = field(default_factory=dict)  # uint8 [N, H, W, 3] each; {} where nothing is rendered
    privileged: Tensor | None = None  # float32 [N, Q]; None if there is none; a policy to be deployed never reads it
    # where chunks overlap (data/action_chunks.py): "actions" [N, C, A] that are left of the last chunk, the next one
    # first, "weights" [N, C] by which the next chunk is drawn to them, and "delay" int64 [N], after how many it arrives
    pending: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.instruction)

    @property
    def proprio(self) -> Tensor:
        """All state vectors side by side, float32 [N, P], of one env step after the other."""
        vectors = list(self.state.values())
        return (vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)).flatten(1)

    def with_proprio(self, proprio: Tensor) -> Observation:
        """Returns the observation with other values [N, P] of its state vectors."""
        vectors = list(self.state.values())
        parts = proprio.unflatten(1, (*vectors[0].shape[1:-1], -1)).split([each.shape[-1] for each in vectors], -1)
        return replace(self, state=dict(zip(self.state, parts, strict=True)))

    def prompted(self, suffix: str | None) -> Observation:
        """Returns the observation with a text behind every instruction that does not end with it; None: as it is."""
        if not suffix:
            return self
        added = lambda text: text if text.endswith(suffix) else f"{text} {suffix}"  # noqa: E731
        return replace(self, instruction=tuple(map(added, self.instruction)))

    def without_images(self) -> Observation:
        """Returns the observation of a moment that is not rendered."""
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

    def padded(self, size: int) -> Observation:
        """Returns `size` rows, the last one repeated as often as needed (policy calls have fixed sizes)."""
        return self.rows([*range(len(self)), *[len(self) - 1] * (size - len(self))])

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """Returns the rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        join = lambda group: {k: torch.cat([getattr(p, group)[k] for p in parts]) for k in getattr(parts[0], group)}  # noqa: E731
        privileged = [part.privileged for part in parts if part.privileged is not None]
        texts = tuple(text for part in parts for text in part.instruction)
        known = torch.cat(privileged) if privileged else None
        return Observation(join("state"), texts, join("images"), known, join("pending"))


@dataclass(frozen=True, slots=True)
class EnvSpec(Chunking):
    """Plain facts about an env.

    For example EnvSpec("PickCube-v1", 32, 5, 50, 7, features_of({"base_camera": (64, 64)}, {"proprio": 19}), "cpu").
    """

    task: str
    num_envs: int  # N
    chunk: int  # C
    horizon: int  # env steps per episode
    action_dim: int  # A
    features: tuple[FeatureSpec, ...]  # of an observation
    backend: str  # which physics ran, for example "physx_cpu (batched)"
    has_success: bool = True  # whether the task can be solved; where not, its return is what counts
    categorical: bool = False  # an action is the choice of one of A: the largest entry, the others are -1
    execute_steps: int = 0  # how many of a chunk's first actions are executed; 0: all C
    history: int = 1  # F, env steps that images and state vectors show

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EnvSpec:
        """Returns the facts whose `asdict` a file holds."""
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
        """Q, 0 without."""
        return sum(feature.shape[0] for feature in self.of_kind(FeatureKind.privileged))


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
            actions: float32 [N, C, A], in [-1, 1] (clipped by the controllers), or in the env's own units where its
                options say so; or a closed-loop controller: a function that is called with each sub-step's number just
                before it runs and returns float32 [N, A].
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
