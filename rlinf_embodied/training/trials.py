"""Plans that a doubted profile cannot distinguish: each runs for an iteration or two, and the fastest one stays.

A profile that was taken during other work may have picked the wrong plan, and the iterations that follow need not show
it: what was mismeasured may be the plan that lost.  Only running it tells.  Weights do not depend on the plan, so that
nothing is lost but the time of the switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinf_embodied.planning.explain import Ranked

MOST = 2  # plans in addition to the picked one
_ITERATIONS = (0, 2, 1)  # that each plan gets, by the number of others: at most four in all until the fastest runs


def doubted(ranked: Sequence[Ranked], disturbed: float) -> list[Ranked]:
    """Returns the plans that may be faster than the first one, the most likely first.

    Args:
        ranked: plans by predicted seconds, the picked one first.
        disturbed: the share of measured seconds in which work waited for a core that others had; a plan whose seconds
            were measured so may take that much less.
    """
    best = ranked[0].iteration_s
    return [entry for entry in ranked[1:] if entry.iteration_s * (1.0 - disturbed) <= best][:MOST]


@dataclass(slots=True)
class Trials:
    """The plans under trial by name, the running one first, and the seconds of their iterations."""

    names: tuple[str, ...]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether every plan had its iterations."""
        return all(len(self.seconds.get(name, ())) >= self._each for name in self.names)

    @property
    def num_iterations(self) -> int:
        """Iterations of all plans together."""
        return self._each * len(self.names)

    @property
    def _each(self) -> int:
        return _ITERATIONS[len(self.names) - 1]

    def observe(self, name: str, seconds: float) -> str:
        """Takes the seconds of an iteration under a plan; returns the name of the plan for the next one."""
        self.seconds.setdefault(name, []).append(seconds)
        due = (other for other in self.names if len(self.seconds.get(other, ())) < self._each)
        if len(self.seconds[name]) < self._each:
            return name
        return next(due, self.winner)

    @property
    def winner(self) -> str:
        """The plan with the fastest iteration: a slow one may be slow for other reasons."""
        return min(self.seconds, key=lambda name: min(self.seconds[name]))

    def told(self) -> str:
        """Returns what the plans took."""
        return ", ".join(f"{name} {min(found):.2f} s" for name, found in self.seconds.items())
