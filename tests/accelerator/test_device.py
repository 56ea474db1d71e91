"""What the library asks of a device is answered by any kind that torch knows, and what it cannot have it names."""

from __future__ import annotations

import pytest
import torch

from rlinf_embodied import device
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.meter import Meter
from rlinf_embodied.learning.weights import move
from rlinf_embodied.runtime.host import StepContext, WorkerHost, WorkerSpec, solo_context

pytestmark = pytest.mark.accelerator


def test_memory_is_that_of_the_device_asked_for(sim) -> None:
    sim.set_limit(1_000_000, 1)
    before, _ = device.used_bytes("sim:1")
    device.reset_peak("sim:1")
    kept = torch.zeros(250, device="sim:1")
    del kept
    assert device.used_bytes("sim:1") == (before, before + 1000)
    device.synchronize("sim:1")
    device.empty_cache("sim:1")


def test_a_meter_reads_an_accelerator_as_it_reads_a_gpu() -> None:
    meter = Meter(None)
    meter.setup(solo_context((0,), "sim:1"))
    meter.reset(StepContext(0))
    before = meter.read(StepContext(0))
    kept = torch.zeros(1000, device="sim:1")
    more = kept + 1
    del more
    after = meter.read(StepContext(0))
    assert after.used_bytes - before.used_bytes == 4000
    assert after.peak_bytes - before.used_bytes == 8000


def test_a_worker_allocates_on_its_own_device_where_a_place_has_no_number() -> None:
    WorkerHost(WorkerSpec(1, "sim:1"))
    assert torch.zeros(1, device="sim").device == torch.device("sim:1")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (WorkerSpec(0, "simm:0"), r"torch_device is 'simm', which this torch does not know .*cluster.device_module"),
        (WorkerSpec(0, "xpu:0"), r"torch_device is 'xpu', but xpu:0 is wanted and this process sees 0 of them"),
        (
            WorkerSpec(9, "sim:9"),
            r"torch_device is 'sim', but sim:9 is wanted and this process sees 8 of them: use clu",
        ),
        (WorkerSpec(0, "sim:0", device_module="no_such"), r"device_module is 'no_such', which cannot be imported"),
    ],
)
def test_a_device_that_is_not_there_is_named_before_anything_starts(spec: WorkerSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WorkerHost(spec)


def test_a_core_and_a_described_device_have_no_memory_of_their_own() -> None:
    assert [device.is_accelerator(name) for name in ("cpu", "emulated", "sim:0", "cuda:1")] == [
        False,
        False,
        True,
        True,
    ]
    for name in ("cpu", "emulated"):
        device.use(name)
        device.synchronize(name)
        device.empty_cache(name)


def test_a_module_that_moves_keeps_its_parameters_and_what_they_share() -> None:
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embedding"].weight
    module.register_buffer("scale", torch.ones(2))
    (held,), before = module.parameters(), module["head"].weight.detach().clone()
    for place in ("sim:0", "cpu", "sim:1", "sim:1"):
        move(module, place)
        assert module["embedding"].weight is module["head"].weight is held
        assert {held.device, module.get_buffer("scale").device} == {torch.device(place)}
        assert torch.equal(held.detach().cpu(), before)
        assert held.requires_grad
