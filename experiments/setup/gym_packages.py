"""What the environments of Gymnasium packages have in common whose versions do not go with those of runs."""

from __future__ import annotations

from pathlib import Path

from envs.foreign.place import Place
from experiments.setup.foreign import Installation

_CHECK = """
from envs.gym.row import Row
row = Row({task!r}, {{"obs_type": "pixels_agent_pos"}}, 64)
assert row.image().std() > 1, row.image().std()
print({task!r})
"""


def installation(name: str, task: str, disk: str, renderer: bool) -> Installation:
    """Returns how .venv-<name> is made of the versions in <name>.txt, and checked by a row of `task`."""
    place = Place(f"gym-{name}", f".venv-{name}", f"RLINF_EMBODIED_{name.upper()}", f"experiments.setup.{name}")
    pins = Path(__file__).with_name(f"{name}.txt")
    return Installation(place, pins, _CHECK.format(task=task), disk, renderer)
