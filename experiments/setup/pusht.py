"""Installs gym-pusht into an environment of its own, .venv-pusht: its versions of pymunk, pygame and OpenCV.

`python -m experiments.setup.pusht` installs the versions of experiments/setup/pusht.txt and draws an image.
"""

from __future__ import annotations

import sys

from experiments.setup.gym_packages import installation

PUSHT = installation("pusht", "gym_pusht:gym_pusht/PushT-v0", "0.4 GB", renderer=False)

if __name__ == "__main__":
    sys.exit(PUSHT.main())
