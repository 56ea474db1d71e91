"""The held-out loss as the check of a run: a goal that is never reached, so that the weights with the lowest stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rlinf_embodied.embodied.cloning import HeldOut
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.telemetry.trace import Span


def held_out_metrics(found: HeldOut | None) -> dict[str, float]:
    """Returns what goes to the learning curve."""
    if found is None:
        return {}
    return {"sft/held_out_loss": found.loss, "sft/held_out_action_error": found.action_error}


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """The held-out loss as a check of a goal that is never reached; see Checked."""

    found: HeldOut
    spans: Sequence[Span] = ()
    reached: bool = False

    @property
    def score(self) -> float | None:
        """Minus the loss."""
        return -self.found.loss

    def summary(self) -> dict[str, object]:
        """Returns the JSON form."""
        return asdict(self.found)

    def metrics(self) -> dict[str, float]:
        """Returns what goes to the learning curve."""
        return held_out_metrics(self.found)

    def __str__(self) -> str:
        """Returns, for example, "held-out loss 1.234, action error 0.056 of 78 chunks"."""
        found = self.found
        return f"held-out loss {found.loss:.3f}, action error {found.action_error:.3f} of {found.num_chunks} chunks"


class HeldOutCheck:
    """See Checking; it asks the stage that learns, so there are no weights to send."""

    def __init__(self, stage: str, training: Executor, newest: Callable[[int], HeldOut]) -> None:
        """Takes the stage that learns, the executor that it is in, and what tells how well it imitates."""
        self.stage, self.executor, self._newest = stage, training, newest

    def run(self, step: int, best: float | None = None) -> HeldOutResult:
        """Returns the held-out loss of the weights as they are now."""
        return HeldOutResult(self._newest(step))
