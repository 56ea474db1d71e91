"""The environments of simulators that have one of their own: every version is given once."""

from __future__ import annotations

import re

import pytest

from experiments.setup.aloha import ALOHA
from experiments.setup.foreign import Installation, split_pins
from experiments.setup.metaworld import METAWORLD
from experiments.setup.pusht import PUSHT


@pytest.mark.parametrize(
    ("installation", "needed"),
    [(METAWORLD, {"metaworld==3.1.1", "mujoco==3.3.0"}), (PUSHT, {"gym-pusht==0.1.8"}), (ALOHA, {"gym-aloha==0.1.5"})],
)
def test_every_package_has_one_version(installation: Installation, needed: set[str]) -> None:
    text = installation.pins.read_text()
    _, pins = split_pins(text)
    names = [pin.split("==")[0] for pin in pins]
    assert len(names) == len(set(names)) == sum(not line.startswith("#") for line in text.splitlines())
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in pins)
    assert needed < {*pins}
