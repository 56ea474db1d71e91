"""Searches that suffice for small cases."""

import pytest

from rlinf_embodied.planning import search


@pytest.fixture
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of a few moves, which suffice for two devices."""
    monkeypatch.setattr(search, "MOST_MOVES", 400)
