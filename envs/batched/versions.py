"""Which ManiSkill and SAPIEN the batched route knows."""

from __future__ import annotations

from importlib.metadata import version

from rlinf_embodied.errors import SimulatorError

TESTED_VERSIONS = {"mani_skill": ("3.0.1",), "sapien": ("3.0.3",)}  # their internals are relied on


def check_versions() -> None:
    """Checks that ManiSkill and SAPIEN are as the batched route expects them.

    Raises:
        SimulatorError: another version.
    """
    for package, tested in TESTED_VERSIONS.items():
        found = version(package)
        if found not in tested:
            raise SimulatorError(
                f"{package} {found} is installed, but the batched CPU backend was tested with {package} "
                f"{' and '.join(tested)} only: install `{package}=={tested[-1]}`, or use stock envs (env.backend=stock)"
            )
