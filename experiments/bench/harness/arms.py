"""Arms alternate, so that other work on the machine disturbs them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TypeVar

_Found = TypeVar("_Found")


def alternate(
    arms: Mapping[str, Callable[[], _Found]],
    rounds: int,
    warm_up: int = 0,
    said: Callable[[int, str, _Found], None] | None = None,
) -> dict[str, list[_Found]]:
    """Returns what each arm gave, round by round.

    Args:
        arms: what is called once per round, by name; every other round goes backwards.
        rounds: that count.
        warm_up: rounds before them.
        said: hears (round, arm, what it gave) of those that count; None: a line is printed after each such round.
    """
    found: dict[str, list[_Found]] = {name: [] for name in arms}
    anyway = gc.get_freeze_count() > 0
    for number in range(-warm_up, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # no arm pays for looking through what the others keep
        for name in list(arms)[:: -1 if number % 2 else 1]:
            given = arms[name]()
            if number < 0:
                continue
            found[name].append(given)
            if said is not None:
                said(number, name, given)
        if number >= 0 and said is None:
            print(f"round {number + 1}/{rounds}", flush=True)
    if not anyway:
        gc.unfreeze()
    return found
