"""What has to be on this machine before a ManiSkill task is built: its name, its assets, a renderer."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import mani_skill.envs  # noqa: F401  registers the tasks
from mani_skill.utils import assets, download_asset
from mani_skill.utils.registration import REGISTERED_ENVS

from envs.batched.rendering import open_renderer
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError, SimulatorError


def check_name(path: str, value: str, known: Collection[str]) -> None:
    """Checks that ManiSkill knows a name; `path` says where it comes from.

    Raises:
        ConfigError: it does not; with suggestions.
    """
    if value in known:
        return
    close = difflib.get_close_matches(value, list(known), n=3, cutoff=0.5)
    some = ", ".join(sorted(known)[:10])
    meant = f"did you mean {' or '.join(close)}?" if close else f"use one of {some}, ..."
    raise ConfigError(f"{path} is {value!r}, but ManiSkill knows no such name: {meant}")


def check_assets(path: str, task_id: str) -> None:
    """Checks that a task's assets are on this machine; ManiSkill would ask on the terminal.

    Raises:
        SimulatorError: they are not; with the command that downloads them.
    """
    wanted = REGISTERED_ENVS[task_id].asset_download_ids or []
    members = assets.expand_data_group_into_individual_data_source_ids
    sources = [source for name in wanted for source in (members(name) if name in assets.DATA_GROUPS else [name])]
    missing = [source for source in sources if not assets.is_data_source_downloaded(source)]
    if missing:
        raise SimulatorError(
            f"{path}={task_id} needs assets that are not on this machine ({', '.join(missing[:3])}): run "
            f"`python -m mani_skill.utils.download_asset {task_id}`, or use a task whose assets ship with ManiSkill, "
            "for example PickCube-v1"
        )


def runs_physx(device: str) -> bool:
    """Returns whether PhysX simulates on a device itself; for any other kind the CPU does."""
    return kind_of(device) == "cuda"


def check_renderer(device: str) -> None:
    """Checks that a Vulkan device can render for this physics device.

    Raises:
        SimulatorError: none can; with the way to get one.
    """
    try:
        open_renderer("cuda" if runs_physx(device) else "cpu")
    except RuntimeError as error:
        raise SimulatorError(
            f"no Vulkan device can render for device={device} ({error}): run `make setup`, or on Debian 12 as root "
            "`apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1` (Ubuntu 24.04: its own packages)"
        ) from error


@contextmanager
def no_questions() -> Iterator[None]:
    """Within it, ManiSkill raises where it would ask on the terminal whether to download a robot."""

    def refuse(message: str) -> bool:
        raise FileNotFoundError(f"{message.strip()} This is done by `python -m mani_skill.utils.download_asset <name>`")

    stock, download_asset.prompt_yes_no = download_asset.prompt_yes_no, refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no = stock
