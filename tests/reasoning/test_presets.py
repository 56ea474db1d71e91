"""Each choice of configs/reasoning/algorithm is what it is named after: its gradient is that of its paper's formula."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from math_runs import completions
from torch import Tensor

from policies.causal_lm import CausalLM
from rlinf_embodied.compose import choices, compose_math
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig, ReasoningAlgorithmConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.gradients import block_sums
from rlinf_embodied.reasoning.batch import LogProbs, Rewards, all_log_probs
from rlinf_embodied.reasoning.objective import STATISTICS, Objective, Round, training_rows

LONGEST = 9  # max_new_tokens
PROMPTS = ((5, 6, 7), (8, 9))
LENGTHS = ((8, 2, 5, 1), (3, 9, 4, 6))  # of each prompt's completions
RAW = ((1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0))  # the second group is all right
REWARDS = ((1.2, 0.0, 0.2, 1.0), (1.0, 1.2, 1.2, 1.0))  # and differs in its form
MIXED = ((0, 0),)  # what dynamic sampling chooses: (round, group)


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    return CausalLM.from_config(
        LanguagePolicyConfig(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64), None, 4
    )


# ----------------------------------------------------------------------------------------------------------- the batch
class Batch:
    """Two groups of four completions, their old and reference log-probs (both far from now), and a critic's words."""

    def __init__(self, policy: CausalLM) -> None:
        draw = torch.Generator().manual_seed(0)
        self.completions = [
            [tuple(torch.randint(2, 25, (n,), generator=draw).tolist()) for n in of_group] for of_group in LENGTHS
        ]
        self.rows = [prompt for prompt in PROMPTS for _ in LENGTHS[0]], [c for group in self.completions for c in group]
        now = all_log_probs(policy, TokenBatch.of(*self.rows), 1.0, 1000)
        noise = lambda scale: scale * torch.randn(now.shape, generator=draw)  # noqa: E731
        self.old, self.reference, self.critic = now + noise(0.3), now + noise(0.4), noise(1.0)

    def round(self, several_steps: bool, with_reference: bool, with_critic: bool) -> Round:
        problems = [Problem(k, "?", "1", None, "text", "own") for k in range(2)]
        return Round(
            completions(problems, *self.rows, log_probs=self.old.tolist()),
            Rewards(torch.tensor(REWARDS), torch.tensor(RAW)),
            old_log_probs=LogProbs(self.old, 0) if several_steps else None,
            reference=LogProbs(self.reference, 0) if with_reference else None,
            critic=self.critic if with_critic else None,
        )


def found_gradient(policy: CausalLM, algorithm: ReasoningAlgorithmConfig, batch: Batch) -> Tensor:
    """Returns the gradient [D] that the actor forms of the batch."""
    made = batch.round(True, algorithm.kl_coef > 0, algorithm.name == "ppo")
    rows = training_rows([made], algorithm, MIXED if algorithm.dynamic_sampling else None)
    parameters = policy.parameters()
    alone = replace(algorithm, tis_cap=None)  # the sampler is the policy itself
    passes = Objective(policy, alone, 1.0, LONGEST, {}).passes(0, rows, torch.arange(len(rows)), "cpu")
    total = block_sums(passes, parameters, len(STATISTICS))
    size = sum(p.numel() for p in parameters)
    return total[:size] / total[size]


# ---------------------------------------------------------------------------------------------------------- the papers
Row = tuple[Tensor, Tensor, Tensor]  # log pi (with gradient), log pi_old, log pi_ref of a completion's tokens


def rows_of(policy: CausalLM, batch: Batch) -> list[list[Row]]:
    """Returns the rows of each group, one by one and without padding."""
    found: list[list[Row]] = []
    for k, of_group in enumerate(batch.completions):
        found.append([])
        for i, tokens in enumerate(of_group):
            logits = policy.model(input_ids=torch.tensor([[*PROMPTS[k], *tokens]])).logits[0].double()
            of_tokens = logits[len(PROMPTS[k]) - 1 : -1, 1:].log_softmax(-1)  # without <pad>, token 0
            now = of_tokens.gather(1, torch.tensor(tokens)[:, None] - 1)[:, 0]
            old, reference = (table[4 * k + i, : len(tokens)].double() for table in (batch.old, batch.reference))
            found[-1].append((now, old, reference))
    return found


def clipped(row: Row, advantage: Tensor | float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A) of each token."""
    ratio = (row[0] - row[1]).exp()
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def standardised(rewards: tuple[float, ...]) -> list[float]:
    return [(r - statistics.mean(rewards)) / statistics.stdev(rewards) for r in rewards]


def ppo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """1707.06347, eq. 7: the mean over all tokens, with the advantages of a critic."""
    every = [row for group in groups for row in group]
    terms = [clipped(row, batch.critic[i, : len(row[0])].double(), 0.2, 0.2) for i, row in enumerate(every)]
    return -torch.cat(terms).mean()


def grpo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2402.03300, eq. 3: 1/G sum_i 1/|o_i| sum_t (min(...) - beta KL), KL by eq. 4; section 4.2: beta = 0.04."""
    terms = []
    for k, group in enumerate(groups):
        for row, advantage in zip(group, standardised(REWARDS[k]), strict=True):
            kl = (row[2] - row[0]).exp() - (row[2] - row[0]) - 1
            terms.append((clipped(row, advantage, 0.2, 0.2) - 0.04 * kl).mean())
    return -torch.stack(terms).mean()


def dapo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2503.14476, eq. 8: 1 / sum_i |o_i| over groups of which some are right and some wrong; clip-higher."""
    mixed = [k for k, raw in enumerate(RAW) if 0 < sum(raw) < len(raw)]
    terms = [
        clipped(row, a, 0.2, 0.28) for k in mixed for row, a in zip(groups[k], standardised(REWARDS[k]), strict=True)
    ]
    return -torch.cat(terms).mean()


def dr_grpo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2503.20783, section 3.2: 1/G sum_i sum_t, over a constant as in its code; A is R less the group's mean."""
    terms = []
    for k, group in enumerate(groups):
        mean = sum(REWARDS[k]) / len(group)
        terms += [clipped(row, r - mean, 0.2, 0.2).sum() for row, r in zip(group, REWARDS[k], strict=True)]
    return -torch.stack(terms).mean() / LONGEST


def rloo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2402.14740: 1/k sum_i (R_i - mean of the others) grad log pi(y_i); a completion is one action.

    After the first of several steps, times pi(y_i) / pi_old(y_i).
    """
    terms = []
    for k, group in enumerate(groups):
        for i, row in enumerate(group):
            others = [r for j, r in enumerate(REWARDS[k]) if j != i]
            ratio = (row[0].sum() - row[1].sum()).exp().detach()
            terms.append((REWARDS[k][i] - sum(others) / len(others)) * ratio * row[0].sum())
    return -torch.stack(terms).mean()


def gspo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2507.18071, eq. 5 and 7: 1/G sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)."""
    terms = []
    for k, group in enumerate(groups):
        for row, advantage in zip(group, standardised(REWARDS[k]), strict=True):
            whole = (row[0].mean(), row[1].mean(), row[2].mean())
            terms.append(clipped(whole, advantage, 3e-4, 4e-4))
    return -torch.stack(terms).mean()


def cispo(groups: list[list[Row]], batch: Batch) -> Tensor:
    """2506.13585, eq. 4 and 5: 1 / sum_i |o_i| sum_i sum_t sg(min(r, 1 + eps)) A log pi, over groups that differ."""
    terms = []
    for k in (k for k, raw in enumerate(RAW) if 0 < sum(raw) < len(raw)):
        for row, advantage in zip(groups[k], standardised(REWARDS[k]), strict=True):
            terms.append((row[0] - row[1]).exp().clamp(max=1.28).detach() * advantage * row[0])
    return -torch.cat(terms).mean()


# of grpo_token, the loss is DAPO's: only what is generated differs (nothing in place of what is dropped)
PAPERS: dict[str, Callable[[list[list[Row]], Batch], Tensor]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gspo": gspo,
    "cispo": cispo,
    "grpo_token": dapo,
    "grpo_annealed": dapo,
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_presets_gradient_is_that_of_its_papers_formula(policy: CausalLM, name: str) -> None:
    batch = Batch(policy)
    algorithm = compose_math([f"algorithm={name}"]).rl
    found = found_gradient(policy, algorithm, batch)
    loss = PAPERS[name](rows_of(policy, batch), batch)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, policy.parameters())])
    assert expected.norm() > 1e-2
    assert (found - expected).norm() < 1e-4 * expected.norm()


# --------------------------------------------------------------------------------------------------------- the choices
def test_every_choice_is_stated_here() -> None:
    assert set(choices("algorithm", MathConfig)) == {*PAPERS, "sft"}
