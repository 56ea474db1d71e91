"""Installs MetaWorld into an environment of its own, .venv-metaworld, whose versions do not fit those of runs.

`python -m experiments.setup.metaworld` installs the versions of experiments/setup/metaworld.txt, and Mesa's off-screen
renderer where there is none and it may (root on Debian or Ubuntu); then it builds a task and renders an image.  What
is there already is left alone, and a set-up that was interrupted goes on.  RLINF_EMBODIED_METAWORLD names another
folder than .venv-metaworld.
"""

from __future__ import annotations

import sys
from pathlib import Path

from envs.metaworld.options import PLACE
from experiments.setup.foreign import Installation

CHECK = """
from envs.foreign.starts import Start
from envs.metaworld.rendering import Look
from envs.metaworld.scene import Scene
scene = Scene("reach-v3", Look(light=True, show_sites=True))
scene.begin(Start(0, None, 0))
image = scene.image(scene.open_eye(), "corner", 64)
assert image.shape == (64, 64, 3) and image.std() > 1, image.std()
print("reach-v3")
"""
METAWORLD = Installation(PLACE, Path(__file__).with_suffix(".txt"), CHECK, "0.3 GB")

if __name__ == "__main__":
    sys.exit(METAWORLD.main())
