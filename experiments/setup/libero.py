"""Installs LIBERO into an environment of its own, .venv-libero, whose versions do not fit those of runs.

`python -m experiments.setup.libero` installs the versions of experiments/setup/libero.txt, and Mesa's off-screen
renderer where there is none and it may (root on Debian or Ubuntu); then it builds a task and renders an image.  What
is there already is left alone, and a set-up that was interrupted goes on.  The tasks, their initial states and all
meshes and textures are in the packages.  RLINF_EMBODIED_LIBERO names another folder than .venv-libero.
"""

from __future__ import annotations

import sys
from pathlib import Path

from envs.libero.options import PLACE
from experiments.setup.foreign import Installation

CHECK = """
from envs.foreign.starts import Start
from envs.libero.scene import Scene, tasks_of
scene = Scene(tasks_of("libero_spatial")[0], settle_steps=1)
scene.begin(Start(0, 0, 0))
image = scene.image(scene.open_eye(), "agentview", 64)
assert image.shape == (64, 64, 3) and image.std() > 1, image.std()
print(scene.task.instruction)
"""
# Python 3.11 is the newest one that MuJoCo 2.3.7 has wheels for
LIBERO = Installation(PLACE, Path(__file__).with_suffix(".txt"), CHECK, "2 GB", python=(3, 11))

if __name__ == "__main__":
    sys.exit(LIBERO.main())
