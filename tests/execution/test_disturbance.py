"""What is measured while other processes take the cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf_embodied.execution import meter
from rlinf_embodied.execution.meter import Moment, Repetition, chosen, shares
from rlinf_embodied.telemetry.trace import Span


def moment(clock_s: float, busy_s: float, waited_s: dict[int, float], used: dict[int, float] | None = None) -> Moment:
    return Moment(clock_s, busy_s, used or {}, waited_s)


def span(worker: int, seconds: float, name: str = "env.step") -> Span:
    return Span(name, name.partition(".")[0], worker, "cpu", 100.0, 100.0 + seconds)


def repetition(waited: float, seconds: float = 2.0) -> Repetition:
    return Repetition((span(0, seconds), span(1, 1.0)), {}, {0: waited, 1: 0.0})


def test_a_share_is_of_the_workers_own_calls() -> None:
    spans = [span(0, 3.0), span(0, 1.0, "policy.step"), span(1, 2.0)]
    found = shares(moment(0.0, 0.0, {0: 10.0, 1: 0.0, 2: 0.0}), moment(4.0, 8.0, {0: 11.0, 1: 0.1, 2: 9.0}), spans)
    assert found == pytest.approx({0: 0.25, 1: 0.05})  # worker 2 had no calls
    assert shares(moment(0.0, 0.0, {0: 0.0}), moment(1.0, 2.0, {0: 50.0}), [span(0, 1.0)]) == {0: 0.9}  # many threads


def test_workers_that_wait_for_each_other_are_not_disturbed() -> None:
    before = moment(0.0, 100.0, {0: 0.0}, used={7: 3.0})
    ours = moment(10.0, 111.0, {0: 5.0}, used={7: 6.0, 8: 7.0})  # 11 s of the machine, of which 10 are of ours
    assert ours.others_since(before) == pytest.approx(0.1)
    assert shares(before, ours, [span(0, 10.0)]) == {}
    others = moment(10.0, 119.0, {0: 5.0}, used={7: 6.0, 8: 7.0})
    assert shares(before, others, [span(0, 10.0)]) == {0: 0.5}


def test_the_machine_says_how_long_its_cores_were_busy(tmp_path: Path, monkeypatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9999 50 4 6 70 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    monkeypatch.setattr(meter, "_MACHINE", stat)
    assert meter.busy_s() == 160 / os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  100 20 30 9999\n")  # as old kernels and sandboxes report it
    assert meter.busy_s() == 150 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(meter, "_MACHINE", tmp_path / "nothing")
    assert meter.busy_s() == 0.0


def test_quiet_repetitions_count_as_they_are_and_disturbed_ones_not_at_all() -> None:
    quiet = [repetition(0.02), repetition(0.08)]
    kept, disturbed = chosen([quiet[0], repetition(0.5), quiet[1]], 2)
    assert (kept, disturbed) == (quiet, 0.08)


def test_where_all_were_disturbed_the_least_disturbed_count_without_their_waiting() -> None:
    kept, disturbed = chosen([repetition(0.5), repetition(0.2), repetition(0.25)], 2)
    assert disturbed == 0.25
    assert [[s.duration_s for s in one.spans] for one in kept] == [
        pytest.approx([1.6, 1.0]),
        pytest.approx([1.5, 1.0]),
    ]


def test_all_workers_of_a_collective_stage_wait_for_the_one_that_waits_for_a_core() -> None:
    spans = (span(0, 2.0, "actor.run"), span(1, 2.0, "actor.run"), span(1, 1.0))
    plain = Repetition(spans, {}, {0: 0.5, 1: 0.1}).without_waiting(["actor", "critic"])
    assert [s.duration_s for s in plain.spans] == pytest.approx([1.0, 1.0, 0.9])
