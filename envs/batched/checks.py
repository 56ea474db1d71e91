"""What callers may pass to an env of N rows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from torch import Tensor

from rlinf_embodied.errors import SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}  # their internals are relied on
SHOWN = 10  # row numbers in a message


def check_versions() -> None:
    """Raises SimulatorError if the batched backend was not tested with the installed ManiSkill or SAPIEN."""
    for package, tested in TESTED_VERSIONS.items():
        found = version(package)
        if found not in tested:
            raise SimulatorError(
                f"{package} {found} is installed, but the batched CPU backend was tested with {package} "
                f"{' and '.join(tested)} only: install `{package}=={tested[-1]}`, or use stock envs (env.backend=stock)"
            )


def short(rows: Sequence[int]) -> str:
    """Returns row numbers as text, the first ten."""
    shown = ", ".join(str(row) for row in rows[:SHOWN])
    return shown + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")


def check_rows(rows: Sequence[int], num_envs: int) -> None:
    """Raises SimulatorError if there are no rows, or one does not exist or comes twice."""
    if not rows or len(set(rows)) != len(rows) or not all(0 <= row < num_envs for row in rows):
        raise SimulatorError(f"reset got rows {list(rows)}: each must be one of 0..{num_envs - 1}, and once")


def check_finite(actions: Tensor, running: Tensor | None = None) -> None:
    """Raises SimulatorError if actions [N, ...] are not finite in the rows of `running` [N] (default: all)."""
    finite = actions.isfinite()
    if finite.all():
        return
    bad = (~finite).flatten(1).any(1)
    if running is not None:
        bad &= running
    if bad.any():
        raise SimulatorError(
            f"actions of rows {short(bad.nonzero()[:, 0].tolist())} are not finite: nothing was stepped; check the "
            "policy's outputs for NaN"
        )
