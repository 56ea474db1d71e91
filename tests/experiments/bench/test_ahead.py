"""What the benchmark of staleness asks for and concludes; what it runs, the tests of staleness run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from experiments.bench import ahead as bench
from experiments.bench.auto import composed
from experiments.bench.auto_cases import CASES
from rlinf_embodied.planning.explain import Ranked

PLAN = cast(Ranked, SimpleNamespace(label="(a > b)", shape="(a > b)", iteration_s=1.5))


def test_times_faster_is_round_by_round() -> None:
    without, ahead = [(2.0, "x"), (3.0, "x")], [(1.0, "y"), (2.0, "y")]
    said = bench.outcome(PLAN, ahead, without)
    assert said["times_faster"] == {"median": 1.75, "low": 1.5, "high": 2.0, "count": 2}
    assert said["weights_sha256"] == "y"
    (first, second) = bench.rows_of("robot", {"0": PLAN, "1": PLAN}, {"0": without, "1": ahead})
    assert first == ("robot", "0", "(a > b)", "1.50", "2.50 (2.00-3.00)", "1.00 (1.00-1.00)")
    assert second[-1] == "1.75 (1.50-2.00)"


def test_rounds_of_one_plan_that_end_with_other_weights_fail() -> None:
    with pytest.raises(ValueError, match="too many values"):
        bench.outcome(PLAN, [(1.0, "x"), (1.0, "y")], [(1.0, "x"), (1.0, "x")])


@pytest.mark.parametrize(("case", "usual"), [("robot", None), ("math_judge", 2.0)])
def test_a_workload_is_asked_for_with_what_corrects_for_its_staleness(case: str, usual: float | None) -> None:
    without, ahead = (composed(bench.with_staleness(CASES[case], k)) for k in (0, 1))
    assert (without.plan.max_staleness, without.algorithm.tis_cap) == (0, usual)
    assert (ahead.plan.max_staleness, ahead.algorithm.tis_cap) == (1, 2.0)


@pytest.mark.parametrize("words", ["staleness=1,2", "staleness=x", "staleness=0,-1", "rounds=0", "cases=nothing"])
def test_what_cannot_be_measured_is_said_first(words: str, capsys) -> None:
    assert bench.BENCHMARK.main([words]) == 2
    assert words.partition("=")[0].rstrip("s") in capsys.readouterr().err
