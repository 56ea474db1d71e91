"""The simulated accelerator, with all of its memory, for each test of this folder."""

from __future__ import annotations

import gc
import importlib

import pytest
import torch

ROOM = 4 << 30


@pytest.fixture(autouse=True)
def sim():
    """What answers for the device, as torch.cuda does for CUDA."""
    importlib.import_module("simulated_accelerator")
    module = torch.get_device_module("sim")
    yield module
    gc.collect()
    for device in range(module.device_count()):
        module.set_limit(ROOM, device)
    module.set_device(0)
