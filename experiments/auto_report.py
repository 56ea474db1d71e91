"""What bench_auto.py concludes: errors of the predictions, verdicts on the picked plan, table, scatter plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_report import Spread, commands, markdown, write_results

WITHIN = 0.03  # of the fastest
HEADER = ("workload", "plan", "predicted, s", "measured, s", "error", "the picked plan is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan of a workload: seconds per iteration, predicted and measured."""

    predicted_s: float
    stages_s: dict[str, float]  # predicted
    measured_s: Spread
    tree: object
    weights_sha256: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s.median - 1

    def to_json(self) -> dict[str, object]:
        """Returns plain values."""
        return {**asdict(self), "error": self.error}


Outcomes = Mapping[str, Outcome]  # of a workload's plans by name; the picked one is called auto


def read(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Outcome]:
    """Returns the outcomes of a workload as `to_json` wrote them."""

    def one(data: Mapping[str, Any]) -> Outcome:
        values: dict[str, Any] = {key: value for key, value in data.items() if key not in ("error", "measured_s")}
        return Outcome(measured_s=Spread(**data["measured_s"]), **values)

    return {name: one(data) for name, data in plans.items()}


def verdict(found: Outcomes) -> tuple[bool, str]:
    """Returns whether the picked plan is the fastest (or as good as it), and how that is meant."""
    measured = {name: outcome.measured_s for name, outcome in found.items()}
    best = min(measured, key=lambda name: measured[name].median)
    auto = measured["auto"]
    if auto.median <= measured[best].median:
        return True, "the fastest"
    behind = auto.median / measured[best].median - 1
    if behind <= WITHIN:
        return True, f"{behind:.1%} behind {best}, within {WITHIN:.0%}"
    if auto.low <= measured[best].high:
        return True, f"{behind:.1%} behind {best}, within the spread"
    return False, f"{behind:.1%} behind {best}"


def lines_of(case: str, found: Outcomes) -> list[tuple[str, ...]]:
    """Returns a row per plan."""
    rows = []
    for name, outcome in found.items():
        said = verdict(found)[1] if name == "auto" else ""
        seconds = f"{outcome.predicted_s:.2f}", f"{outcome.measured_s:.2f}"
        rows.append((case, name, *seconds, f"{outcome.error:+.1%}", said))
    return rows


def summary(results: Mapping[str, Outcomes]) -> dict[str, object]:
    """Returns the errors over all plans and the verdicts by workload."""
    errors = [abs(outcome.error) for found in results.values() for outcome in found.values()]
    return {
        "median_error": Spread.of(errors).median,
        "worst_error": max(errors),
        "verdicts": {case: verdict(found)[1] for case, found in results.items()},
        "weights_equal": all(len({o.weights_sha256 for o in found.values()}) == 1 for found in results.values()),
        "workloads": {case: {name: o.to_json() for name, o in found.items()} for case, found in results.items()},
    }


def write_report(out: str, results: Mapping[str, Outcomes], content: Mapping[str, object]) -> None:
    """Writes JSON, a Markdown table, and the scatter plot of predictions."""
    write_results(out, content)
    if not out:
        return
    rows = [row for case, found in results.items() for row in lines_of(case, found)]
    text = ["# plan=auto, measured", "", commands("bench_auto.py", content), "", markdown(HEADER, rows), ""]
    text += [f"{key}: {content[key]}" for key in ("median_error", "worst_error")]
    Path(out).with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    _scatter(Path(out).with_suffix(".png"), results)


def _scatter(path: Path, results: Mapping[str, Outcomes]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for case, found in results.items():
        points = [(outcome.predicted_s, outcome.measured_s.median) for outcome in found.values()]
        axes.plot(*zip(*points, strict=True), "o", label=case, alpha=0.8)
    low, high = axes.get_xlim()[0], max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([low, high], [low, high], color="0.5", lw=1)
    axes.fill_between([low, high], [0.88 * low, 0.88 * high], [1.12 * low, 1.12 * high], color="0.9", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="predicted, s per iteration", ylabel="measured, s per iteration")
    axes.set_title("band: 12 %")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
