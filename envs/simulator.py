"""The interface of a simulator: N rows that can be reset, stepped and measured, and perhaps rendered.

A custom env is a `Simulator` inside envs.episodes.EpisodeEnv, which adds episodes: docs/own_env.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlinf_embodied.errors import SimulatorError


def short(rows: Sequence[int]) -> str:
    """Returns row numbers as text: the first ten, and how many more there are."""
    return ", ".join(map(str, rows[:10])) + (f" and {len(rows) - 10} more" if len(rows) > 10 else "")


def all_finite(values: Tensor) -> bool:
    """Returns whether all float32 entries are finite; tries their sum first, which costs a third as much."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


@dataclass(frozen=True, slots=True)
class Measurement:
    """The state of B rows after a step or reset."""

    reward: Tensor  # float32 [B], the task's reward before shaping
    success: Tensor  # bool [B], the task is solved now
    proprio: Tensor  # float32 [B, P], the robot's proprioception
    fail: Tensor | None = None  # bool [B], the episode cannot be solved any more and ends; None: that never happens
    privileged: Tensor | None = (
        None  # float32 [B, Q - CLOCK_COLUMNS], the simulator's full state; None: same as `proprio`
    )
    terminated: Tensor | None = None  # bool [B], the simulator itself ends the episode, solved or not; None: never
    truncated: Tensor | None = None  # bool [B], the simulator itself cuts the episode off; None: env.horizon alone does

    @staticmethod
    def concatenate(parts: Sequence[Measurement]) -> Measurement:
        """Returns the rows of all parts, in order."""
        present = [name for name in _FORMS if getattr(parts[0], name) is not None]
        return Measurement(**{name: torch.cat([getattr(part, name) for part in parts]) for name in present})

    def checked(self, num_rows: int, simulator: object) -> Measurement:
        """Returns itself; raises SimulatorError for a field with a wrong type, dtype or shape, or non-finite values."""
        source = f"{type(simulator).__name__}.measure returned"
        for name, (dtype, axes) in _FORMS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            fits = isinstance(value, Tensor) and value.dtype is dtype and value.ndim == axes and len(value) == num_rows
            if not fits:
                actual = (
                    f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                )
                expected = f"{dtype} [{num_rows}{', D' * (axes - 1)}]".removeprefix("torch.")
                raise SimulatorError(
                    f"{source} {name} as {actual.removeprefix('torch.')}, but {expected} is needed: use "
                    f"torch.as_tensor(..., dtype={dtype}) with one row per row of the env"
                )
            if dtype is torch.float32 and not all_finite(value):
                rows = (~value.isfinite().view(num_rows, -1).all(1)).nonzero()[:, 0].tolist()
                raise SimulatorError(
                    f"{source} {name} that is NaN or infinite in rows {short(rows)}: a policy would learn NaN from it; "
                    "end such an episode with `fail` (Gymnasium: terminated), and return finite numbers"
                )
        return self


_FORMS = {  # dtype and number of axes
    "reward": (torch.float32, 1),
    "success": (torch.bool, 1),
    "proprio": (torch.float32, 2),
    "fail": (torch.bool, 1),
    "privileged": (torch.float32, 2),
    "terminated": (torch.bool, 1),
    "truncated": (torch.bool, 1),
}
_OPTIONAL = ("fail", "privileged", "terminated", "truncated")


@dataclass(frozen=True, slots=True)
class RowTask:
    """A row's task, where rows have several tasks."""

    name: str
    instruction: str


class Simulator(Protocol):
    """N rows of a task, without any notion of an episode.

    A class that inherits from this defines num_rows, action_dim, reset, step and measure; the rest is optional.
    """

    num_rows: int
    action_dim: int
    backend: str = "own"
    device: torch.device = torch.device("cpu")
    history_free: bool = True  # whether an episode is a function of its seed and actions and can be replayed
    has_success: bool = True  # whether `measure` reports success; otherwise the return is the metric
    categorical: bool = False  # an action is the index of the largest of its A entries
    control_hz: float = 0.0  # steps per second of a robot with a fixed rate, which env.control_hz must equal
    state_vectors: Mapping[str, int] = {}  # the names and lengths of the parts of `proprio`; {}: one part, "proprio"
    image_sizes: Mapping[str, tuple[int, int]] = {}  # height and width of cameras that differ from env.obs_size
    perturbs: tuple[str, ...] = ("initial_steps",)  # axes of env.perturb that it supports besides those of EpisodeEnv
    expert: Callable[[], Tensor] | None = None  # the scripted expert's action for every row [N, A]

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Brings each of these rows to the initial state of its seed."""
        ...

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows; actions float32 [N, A], entries of other rows are ignored."""
        ...

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all N rows, reached by `actions` [N, A]."""
        ...

    def images(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        """Returns the images of the cameras in env.cameras, each uint8 [len(rows), H, W, 3].

        Raises:
            SimulatorError: env.cameras names cameras, but the simulator renders no images.
        """
        raise SimulatorError(
            f"env.cameras asks for images, but {type(self).__name__} renders none: set env.cameras=[] (policy=state "
            "does so), or write its method `images`"
        )

    def object_positions(self) -> Tensor | None:
        """Returns the position of the object to handle, float32 [N, 3] in metres, None for a task without one."""
        return None

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns an image uint8 [size, size, 3] of each of these rows for a video; {} if it cannot render any."""
        return {}

    def close(self) -> None:
        return
