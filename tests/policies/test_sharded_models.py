"""FSDP2 around language models of several architectures: tied embeddings, frozen parts, two precisions in a layer."""

from __future__ import annotations

import copy

import pytest
import torch
from language_models import MODELS, language_model

from policies.causal_lm import CausalLM
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.gradients import LossSums, Pass, Passes
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.learner import AdamSettings, Learner
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.sharded import ShardedLearner
from rlinf_embodied.reasoning.objective import zero_loss

pytestmark = pytest.mark.usefixtures("no_group_stays")

ADAM = AdamSettings(1e-3, (0.9, 0.99), 0.5)
WEIGHT = 16.0  # of a pass; a backward pass in bfloat16 rounds alike before and after a division by a power of two
BATCHES = [
    TokenBatch(2 + torch.arange(27).reshape(3, 9) * 7 % 23, torch.tensor([2, 3, 2]), torch.tensor([9, 8, 7])),
    TokenBatch(2 + torch.arange(10).reshape(2, 5) * 3 % 23, torch.tensor([1, 3]), torch.tensor([5, 4])),
]


def adapted() -> CausalLM:
    """A model in bfloat16 whose float32 adapters are trained."""
    plain = language_model("qwen2")
    return CausalLM(
        plain.model.to(torch.bfloat16), plain.codec, LanguagePolicyConfig(lora=LoraSettings(rank=4)), seed=1
    )


KINDS = {name: (lambda n=name: language_model(n)) for name in MODELS} | {"adapters": adapted}


def passes_of(policy: CausalLM) -> Passes:
    def one(batch: TokenBatch) -> Pass:
        def run() -> LossSums:
            loss = -policy.log_probs(batch, 0.8, with_entropy=False).log_probs.sum()
            return LossSums(loss, torch.tensor(WEIGHT), loss.detach().reshape(1))

        return Pass(WEIGHT, run)

    return lambda rows: [one(BATCHES[block]) for block in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_makes_the_step_of_a_whole_one(kind):
    whole, view, sharded = (KINDS[kind]() for _ in range(3))
    expected = Learner(whole.parameters(), ADAM, ("loss",), Reducer(SoloGroup(), [0, 0]))
    learner = ShardedLearner(
        *(sharded.module, sharded.parameters, view.module, ADAM, ("loss",)),
        zero_loss=lambda: zero_loss(sharded, "cpu"),
        group=SoloGroup(),
        device="cpu",
    )
    before = copy.deepcopy(view.module.state_dict())
    rows = {0: torch.arange(1), 1: torch.arange(1)}
    found, told = learner.step(rows, passes_of(sharded)), expected.step(rows, passes_of(whole))
    assert found.sums == pytest.approx(told.sums, rel=1e-5, abs=1e-4)
    assert found.norm == pytest.approx(told.norm, rel=1e-5)
    state = learner.export_state()
    for name, tensor in expected.export_state().items():  # not weights: Adam makes steps of gradients that are rounding
        assert (state[name] - tensor).double().norm() <= 1e-5 * tensor.double().norm()
    learner.publish()
    for name, parameter in whole.module.named_parameters():
        now = view.module.get_parameter(name)
        changed = not torch.equal(parameter, before[name])  # adapters: one of two factors starts at 0
        assert changed <= parameter.requires_grad
        assert changed == (not torch.equal(now, before[name])), name
        torch.testing.assert_close(now, parameter, rtol=0, atol=2 * ADAM.lr)


def test_a_pass_over_nothing_is_zero_and_leaves_no_gradient():
    policy = language_model("qwen2")
    loss = zero_loss(policy, "cpu")
    assert loss == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())
