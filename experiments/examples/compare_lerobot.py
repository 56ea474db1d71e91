"""Compares a policy that was trained here with what the real lerobot makes of its folder, on frames of a dataset.

python -m experiments.examples.compare_lerobot checkpoint=runs/pi_rl/checkpoints/latest data=<LeRobot folder>

Needs the environment of `python -m experiments.setup.foreign env=lerobot`.  Exit code 1: actions differ by more than
1e-4 of the largest of them (at least of 1).
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envs.foreign.adapter import installed_python
from experiments.check_conventions import ConventionsConfig, read_demonstrations
from rlinf_embodied.command_line import main

LIMIT = 1e-4
_SCRIPT = Path(__file__).with_name("lerobot_actions.py")


@dataclass(kw_only=True)
class Options:
    """The keys."""

    checkpoint: str = ""
    data: str = ""  # a folder of LeRobot
    num_frames: int = 20  # evenly spread over the dataset


def compare(own: Options) -> int:
    """Prints the largest difference; returns the exit code."""
    ours, theirs = both_actions(own)
    scale = max(1.0, float(np.abs(ours).max()))
    difference = float(np.abs(ours - theirs).max()) / scale
    print(f"{len(ours)} frames, actions {list(ours.shape[1:])} up to {scale:.4g}: largest difference {difference:.2e}")
    return int(difference > LIMIT)


def both_actions(own: Options) -> tuple[np.ndarray, np.ndarray]:
    """Returns the actions [M, C, A] of this project and of lerobot, from the same noise."""
    python = installed_python("lerobot", "lerobot")
    checked = ConventionsConfig(checkpoint=own.checkpoint, data=own.data, num_frames=own.num_frames)
    predict, demos, noise = read_demonstrations(checked)
    seen = demos.observation
    given: dict[str, Any] = {f"observation.images.{name}": image.numpy() for name, image in seen.images.items()}
    assert noise is not None, "policies that lerobot has begin with noise"
    given |= {"observation.state": seen.proprio.numpy(), "task": np.array(seen.instruction)}
    given["noise"] = noise[:, 0].numpy()
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        ours, asked, answered = predict(seen).numpy(), Path(place) / "asked.npz", Path(place) / "answered.npz"
        np.savez(asked, **given)
        subprocess.run([python, _SCRIPT, Path(own.checkpoint).resolve(), asked, answered], check=True)
        return ours, np.load(answered)["actions"]


if __name__ == "__main__":
    main(compare, Options)
