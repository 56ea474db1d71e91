"""What a run says of its own times."""

from __future__ import annotations

from types import SimpleNamespace

from rlinf_embodied.training.account import Account


def test_a_snapshot_that_takes_seconds_is_told_once_and_a_short_one_never() -> None:
    said: list[str] = []
    account, view = Account(SimpleNamespace(first_work="step"), 0.0), SimpleNamespace(note=said.append)
    for snapshot_s, whole_s in ((0.04, 0.05), (0.9, 2.0), (2.0, 30.0)):
        account.note_snapshot({"time/snapshot_s": snapshot_s, "time/iteration_s": whole_s}, view)
    assert said == []
    for _ in range(2):
        account.note_snapshot({"time/snapshot_s": 4.0, "time/iteration_s": 30.0}, view)
    assert [line.partition(": raise")[0] for line in said] == [
        "warning: the snapshot for recovery took 4.0 s beside 30.0 s of an iteration"
    ]
