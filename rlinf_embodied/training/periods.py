"""What was predicted of each plan of a run, and what its iterations took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.planning.drift import Prediction
from rlinf_embodied.planning.plan import Plan


@dataclass(slots=True)
class Period:
    """Iterations under one plan: what was predicted, and what each took."""

    plan: Plan
    predicted: Prediction | None
    first_iteration: int
    iteration_s: list[float] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Returns the period as JSON-ready data: medians, and the relative error of each prediction."""
        measured = {"iteration": median(self.iteration_s)}
        measured |= {stage: median(seconds) for stage, seconds in self.stages_s.items()}
        predicted: dict[str, float] = {}
        if self.predicted is not None and math.isfinite(self.predicted.iteration_s):
            predicted = {"iteration": self.predicted.iteration_s, **self.predicted.stages_s}
        both = [name for name in predicted if measured.get(name)]
        return {
            "plan": self.plan.name,
            "first_iteration": self.first_iteration,
            "num_iterations": len(self.iteration_s),
            "predicted_s": predicted,
            "measured_s": measured,
            "error": {name: predicted[name] / measured[name] - 1 for name in both},
        }


def median(values: Sequence[float]) -> float:
    """Returns the median, 0 without values."""
    return statistics.median(values) if values else 0.0


def report_rows(period: Mapping[str, object]) -> list[dict[str, str]]:
    """Returns a row for the iteration and for each stage of a period."""
    predicted, measured, error = (period[key] for key in ("predicted_s", "measured_s", "error"))
    assert isinstance(predicted, Mapping)
    assert isinstance(measured, Mapping)
    assert isinstance(error, Mapping)
    return [
        {
            "plan": str(period["plan"]) if name == "iteration" else "",
            "stage": name,
            "predicted": f"{predicted[name]:.3g}" if name in predicted else "-",
            "measured": f"{seconds:.3g}",
            "error": f"{error[name]:+.0%}" if name in error else "-",
        }
        for name, seconds in measured.items()
    ]
