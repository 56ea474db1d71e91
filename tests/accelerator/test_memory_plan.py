"""The formulas of a memory plan against what the simulated accelerator counts, on a small OpenVLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import openvla_folders as toys
import pytest
import torch
from torch import Tensor, nn

from policies.openvla.footprint import OpenVLAFootprint, add_adapters, meta_network
from policies.openvla.network import OpenVLA
from policies.openvla.settings import OpenVLAConfig, config_of
from rlinf_embodied.learning.gradients import LossSums, Pass, checkpoint_blocks
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.tools import memory
from rlinf_embodied.tools.memory import PolicyShape, policy_shape

pytestmark = pytest.mark.accelerator

OFF = 0.05
PROMPT, ACTIONS, RANK = 20, 3, 4
ROWS = 5  # others than those that the formulas are counted with
TOWER = {"depth": 4, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 4.0}
RAW = toys.RAW | {
    "image_sizes": [84, 84],
    "timm_model_args": [TOWER, TOWER],
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 1088,
        "pad_token_id": 0,
    },
}
WAYS = {"full, float32": (0, torch.float32), "adapters, bfloat16": (RANK, torch.bfloat16)}


@pytest.fixture(scope="module")
def config() -> OpenVLAConfig:
    return config_of(RAW)


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[int, torch.dtype]:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def shape(config: OpenVLAConfig, way: tuple[int, torch.dtype]) -> PolicyShape:
    rank, dtype = way
    return policy_shape(OpenVLAFootprint(meta_network(config, dtype, rank), PROMPT, ACTIONS))


@pytest.fixture
def policy(config: OpenVLAConfig, way: tuple[int, torch.dtype]) -> OpenVLAFootprint:
    rank, dtype = way
    network = OpenVLA(config)
    if rank:
        network.requires_grad_(False)
        add_adapters(network, rank, ["all-linear"])
    return OpenVLAFootprint(network.to(dtype).to("sim"), PROMPT, ACTIONS)


def peak_of(sim, run: Callable[[], object]) -> float:
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    run()
    return sim.max_memory_allocated() - before


def trained(policy: OpenVLAFootprint) -> list[nn.Parameter]:
    return [p for p in policy.module.parameters() if p.requires_grad]


def gradients(policy: OpenVLAFootprint) -> list[Tensor | None]:
    return list(torch.autograd.grad(policy.loss(ROWS), trained(policy), allow_unused=True))


def test_weights_lie_there_as_planned(sim, config: OpenVLAConfig, way: tuple[int, torch.dtype], shape: PolicyShape):
    rank, dtype = way
    network = OpenVLA(config)
    if rank:
        add_adapters(network, rank, ["all-linear"])
    before = sim.memory_allocated()
    network = network.to(dtype).to("sim")
    assert sim.memory_allocated() - before == pytest.approx(memory.weights(shape), rel=OFF)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_takes_what_was_planned(sim, policy: OpenVLAFootprint, shape: PolicyShape, checkpointing: bool):
    if checkpointing:
        checkpoint_blocks(policy.blocks())
    found = peak_of(sim, partial(gradients, policy))
    assert found == pytest.approx(shape.work(checkpointing).with_gradients.at(ROWS), rel=OFF)
    other = shape.work(not checkpointing).with_gradients.at(ROWS)
    assert abs(found - other) > 2 * OFF * other


def test_a_later_pass_takes_what_was_planned_beside_gradients(sim, policy: OpenVLAFootprint, shape: PolicyShape):
    policy.loss(ROWS).backward()
    found = peak_of(sim, lambda: policy.loss(ROWS).backward())
    assert found == pytest.approx(shape.plain.into_gradients.at(ROWS), rel=OFF)


def test_a_call_of_a_rollout_takes_what_was_planned(sim, policy: OpenVLAFootprint, shape: PolicyShape):
    assert peak_of(sim, lambda: policy.act(ROWS)) == pytest.approx(shape.rollout.at(ROWS), rel=OFF)


# ---------------------------------------------------------------------------------------------------------- a learner
@pytest.fixture
def whole(config: OpenVLAConfig) -> OpenVLAFootprint:
    """All weights are trained, in float32 as the learner asks."""
    return OpenVLAFootprint(toys.network(raw=RAW).to("sim"), PROMPT, ACTIONS)


@pytest.fixture(scope="module")
def whole_shape(config: OpenVLAConfig) -> PolicyShape:
    return policy_shape(OpenVLAFootprint(meta_network(config, torch.float32), PROMPT, ACTIONS))


def learner_of(policy: OpenVLAFootprint) -> ReplicatedLearner:
    settings = AdamSettings(1e-4, (0.9, 0.999), 1.0)
    return ReplicatedLearner(trained(policy), settings, ("loss",), Reducer(SoloGroup(), [0, 0], exact=False))


def take_step(policy: OpenVLAFootprint, learner: ReplicatedLearner, rows: int) -> None:
    def run() -> LossSums:
        loss = policy.loss(rows)
        return LossSums(loss, loss.new_tensor(float(rows)), loss.detach().reshape(1))

    index = torch.zeros(rows, dtype=torch.int64)
    step = learner.step({0: index, 1: index}, lambda block, index: [Pass(float(rows), run)])
    assert step.norm is not None


def test_moments_are_as_large_as_planned(sim, whole: OpenVLAFootprint, whole_shape: PolicyShape):
    before = sim.memory_allocated()
    kept = learner_of(whole)
    assert sim.memory_allocated() - before == pytest.approx(memory.moments(whole_shape), rel=OFF)
    del kept


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [1, 24])  # where gradients, and where activations need the most
def test_a_step_of_the_replicated_learner_takes_what_was_planned(
    sim, whole: OpenVLAFootprint, whole_shape: PolicyShape, rows: int, checkpointing: bool
):
    if checkpointing:
        checkpoint_blocks(whole.blocks())
    learner = learner_of(whole)
    work = memory.replicated_work(whole_shape, checkpointing)
    found = peak_of(sim, lambda: take_step(whole, learner, rows))
    assert found == pytest.approx(work.at(rows), rel=OFF)
    assert (work.at(rows) > 5 * memory.gradient(whole_shape)) == (rows == 24)


def test_the_most_rows_that_fit_run_and_one_more_does_not(sim, whole: OpenVLAFootprint, whole_shape: PolicyShape):
    learner = learner_of(whole)
    work = memory.replicated_work(whole_shape, checkpointing=False)
    room = 1.5 * work.at(24)
    most = work.most_rows(room)
    assert most > 24
    sim.set_limit(int(sim.memory_allocated() + room))
    take_step(whole, learner, int(most * (1 - OFF)))
    with pytest.raises(torch.OutOfMemoryError):
        take_step(whole, learner, int(most * (1 + OFF)) + 1)
