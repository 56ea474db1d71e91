"""Installs gym-aloha into an environment of its own, .venv-aloha: its versions of MuJoCo and dm_control.

`python -m experiments.setup.aloha` installs the versions of experiments/setup/aloha.txt, Mesa's off-screen renderer
where there is none and it may, and draws an image.
"""

from __future__ import annotations

import sys

from experiments.setup.gym_packages import installation

ALOHA = installation("aloha", "gym_aloha:gym_aloha/AlohaTransferCube-v0", "0.6 GB", renderer=True)

if __name__ == "__main__":
    sys.exit(ALOHA.main())
