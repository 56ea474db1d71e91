"""Finds what is wrong with datasets before anything learns from them: LeRobot v2 and v3, RLDS.

python experiments/check_dataset.py data=runs/pick,runs/others

prints a line per finding: what it is, where it begins, what was measured, what to do.  rlinf_embodied/data/faults.py
lists what is looked for.  All images are decoded, which takes minutes for thousands of frames; `images=false` leaves
them out.  Exit code 0: nothing found; 1: something was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.command_line import main


@dataclass(kw_only=True, slots=True)
class DatasetCheckConfig:
    """Everything that experiments/check_dataset.py reads."""

    data: str  # folders of LeRobot or RLDS, joined by commas
    images: bool = True  # decode them


def check(config: DatasetCheckConfig) -> int:
    from rlinf_embodied.data.faults import find_faults
    from rlinf_embodied.embodied.sources import open_dataset

    total = 0
    for place in config.data.split(","):
        dataset = open_dataset(Path(place), "data")
        cameras = ", ".join(dataset.cameras) or "none"
        print(f"{place}: {dataset.num_episodes} episodes, {len(dataset)} frames, cameras {cameras}")
        faults = find_faults(dataset, Path(place), config.images)
        total += len(faults)
        print(*(f"  {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    print(f"{total} findings" if total else "nothing found")
    return 1 if total else 0


if __name__ == "__main__":
    main(check, DatasetCheckConfig)
