"""The emulated benchmark's arithmetic: errors, winners and speed-ups, from results made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.bench.planner import emulated as bench
from experiments.bench.planner import published
from rlinf_embodied.planning.plan import Item, Place, Plan
from rlinf_embodied.tools.emulation import Emulated
from rlinf_embodied.tools.plans import find_cluster


def result(predicted_s: float, measured_s: float) -> Emulated:
    plan = Plan("p", 1, (Item((Place("a", (0,)),)),))
    return Emulated(plan, predicted_s, (measured_s,), (measured_s - 1,), 1e9, 0.5, 0.01)


def test_a_report_says_who_won_and_how_well_it_was_foretold() -> None:
    cell = bench.Cell("grpo_llm", "h100x8", reasons={"disaggregated": "too little memory"})
    cell.results = {
        "auto": [result(99.0, 100.0), result(99.0, 104.0)],
        "collocated": [result(99.0, 100.0), result(99.0, 104.0)],
        "hybrid": [result(120.0, 100.0)],
    }
    assert cell.measured_s("auto") == 102.0
    assert cell.winner() == "hybrid"
    text = bench.page([cell], "`run`", 60.0)
    assert "| 99.0 / 102.0 (-2.9%; 1.0%) | - | 120.0 / 100.0 (+20.0%; 1.0%) | 99.0 / 102.0" in text
    assert "| hybrid | collocated | 1.020 |" in text
    assert "error of the predictions: median 2.94%, worst 20.00%" in text
    assert "the published winner is first in 0 of 1 cells" in text
    assert "grpo_llm on h100x8, disaggregated: too little memory" in text


@pytest.mark.slow
def test_every_cell_has_the_planners_choice_and_each_mode_or_the_reason() -> None:
    cell, pricer = bench.make_cell("ppo_llm", "8")
    assert pricer.cluster.emulated
    assert set(cell.plans) | set(cell.reasons) == {"auto", "collocated", "hybrid", "disaggregated"}


def test_nodes_of_eight_make_up_larger_clusters() -> None:
    described = find_cluster("h100x64")
    assert published.h100(64) == replace(described, name="h100x64")
    assert (published.h100(16).num_devices, published.h100(16).place_of(15).node) == (16, 1)
