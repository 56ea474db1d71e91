"""The ring keeps the newest transitions, and what is drawn depends on its key alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_embodied.embodied.replay_stage import ReplayBuffer
from rlinf_embodied.errors import CheckpointError


def numbered(first: int, last: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, last, dtype=torch.float32)
    return {"reward": numbers, "state": torch.stack([numbers, -numbers], 1)}


def held(buffer: ReplayBuffer) -> list[float]:
    return sorted(buffer.export_state()["reward"].tolist())


@settings(max_examples=50, deadline=None)
@given(capacity=st.integers(1, 9), sizes=st.lists(st.integers(0, 9), max_size=6))
def test_the_newest_are_held(capacity, sizes) -> None:
    buffer, every = ReplayBuffer(capacity), []
    for size in (min(size, capacity) for size in sizes):
        buffer.add(numbered(len(every), len(every) + size))
        every += range(len(every), len(every) + size)
    assert len(buffer) == min(len(every), capacity)
    if every:
        assert held(buffer) == every[-capacity:]


def test_a_draw_is_keyed_keeps_columns_together_and_reaches_all() -> None:
    buffer = ReplayBuffer(10)
    buffer.add(numbered(0, 7))
    drawn = buffer.draw((50, 4), 1, "replay", 3, 8)
    assert drawn["state"].shape == (50, 4, 2)
    assert torch.equal(drawn["state"][..., 0], drawn["reward"])
    assert torch.equal(drawn["state"][..., 1], -drawn["reward"])
    assert sorted(set(drawn["reward"].flatten().tolist())) == list(range(7))
    assert torch.equal(drawn["reward"], buffer.draw((50, 4), 1, "replay", 3, 8)["reward"])
    assert not torch.equal(drawn["reward"], buffer.draw((50, 4), 1, "replay", 3, 9)["reward"])


@pytest.mark.parametrize("number", [2, 3, 4])
def test_draws_with_returns_are_of_episodes_that_have_ended(number) -> None:
    buffer = ReplayBuffer(6, episodes=(2, 10))  # of two rows, three steps are held
    steps = [(0.0, -1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)][:number]
    for k, outcomes in enumerate(steps):
        buffer.add(numbered(2 * k, 2 * k + 2) | {"outcome": torch.tensor(outcomes)})
    drawn = buffer.draw((200,), 1, "replay")
    every = {0: -0.1, 1: -1.0, 2: 0.0} if number < 4 else {2: 0.0, 3: -0.2, 5: -0.1, 7: 0.0}
    expected = {k: pytest.approx(left) for k, left in every.items()}
    assert dict(zip(drawn["reward"].tolist(), drawn["return"].tolist(), strict=True)) == expected


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_restored_buffer_continues_as_the_saved_one(size) -> None:
    saved, restored = ReplayBuffer(5), ReplayBuffer(5)
    for first in range(0, size, 2):
        saved.add(numbered(first, min(first + 2, size)))
    restored.import_state(saved.export_state())
    for buffer in (saved, restored):
        buffer.add(numbered(100, 102))
    assert torch.equal(saved.draw((40,), 0, "x")["reward"], restored.draw((40,), 0, "x")["reward"])
    assert held(saved) == held(restored)


@pytest.mark.parametrize(
    "state",
    [
        {**numbered(0, 9), "cursor": torch.tensor([0])},
        {"reward": torch.zeros(2), "state": torch.zeros(3, 2), "cursor": torch.tensor([0])},
        numbered(0, 2),
    ],
    ids=["too many", "of unlike lengths", "without a cursor"],
)
def test_a_state_of_another_run_is_refused(state) -> None:
    with pytest.raises(CheckpointError, match=r"has \[.*\] transitions and room for 5: .*another run.dir"):
        ReplayBuffer(5).import_state(state)
