"""The policy's loss against one written down token by token; what rows it is formed over; what completions earn."""

from __future__ import annotations

import copy
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from math_runs import TWO_STEPS, completions, tiny_math
from runs import learned
from torch import Tensor

from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.policy_losses import Clipped, SequenceClipped
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import LanguagePolicyConfig, LossLevel, RatioLevel, ReasoningAlgorithmConfig
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.gradients import block_sums
from rlinf_embodied.reasoning import actor_stage
from rlinf_embodied.reasoning.batch import (
    GenerationBlock,
    LogProbs,
    Prompt,
    Rewards,
    all_log_probs,
    dynamic_batches,
)
from rlinf_embodied.reasoning.engine import generate
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.objective import STATISTICS, Objective, Round, TrainingRows, training_rows
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.reward_stage import RewardStage
from rlinf_embodied.runtime.host import StepContext, solo_context

TEMPERATURE, LONGEST = 0.8, 12
PROMPTS, COMPLETIONS = (3, 9, 1, 6, 4, 5), (8, 2, 12, 1, 7, 12)  # lengths
EVERYTHING = {"entropy_coef": 0.03, "kl_coef": 0.2, "tis_cap": 1.1, "clip_low": 0.1, "clip_high": 0.3}


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    return CausalLM.from_config(
        LanguagePolicyConfig(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64), None, 4
    )


def restricted(sequences: TokenBatch, draw: torch.Generator) -> TokenBatch:
    """Sets of up to eight tokens that hold the sampled one; every third token was not restricted."""
    others = lambda: torch.randint(1, 25, (7,), generator=draw).tolist()  # noqa: E731
    sets = [[{token, *others()} if t % 3 else set() for t, token in enumerate(row)] for row in sequences.completions()]
    ids = [array("i", itertools.chain(*map(sorted, row))) for row in sets]
    made = TokenBatch.of([[0]] * len(sets), sequences.completions(), None, [[*map(len, row)] for row in sets], ids)
    return replace(sequences, support=made.support)


def rows_of(policy: CausalLM, old_log_probs: bool = True, support: bool = False) -> TrainingRows:
    """Six completions whose log-probs under older weights, generation and reference lie on both sides."""
    draw = torch.Generator().manual_seed(0)
    tokens = lambda n: tuple(torch.randint(1, 25, (n,), generator=draw).tolist())  # noqa: E731
    sequences = TokenBatch.of([*map(tokens, PROMPTS)], [*map(tokens, COMPLETIONS)])
    sequences = restricted(sequences, draw) if support else sequences
    noise = lambda scale: scale * torch.randn(len(PROMPTS), LONGEST, generator=draw)  # noqa: E731
    now = all_log_probs(policy, sequences, TEMPERATURE, 1000)
    old = now + noise(0.3)
    return TrainingRows(
        sequences=sequences,
        rollout_log_probs=(old if old_log_probs else now) + noise(0.2),
        advantages=torch.randn(len(PROMPTS), 1, generator=draw).expand(-1, LONGEST),
        old_log_probs=old if old_log_probs else None,
        reference=now + noise(0.4),
        num_trained=len(PROMPTS),
        num_groups=2,
    )


def chosen(rows: TrainingRows, index: Sequence[int], num_trained: int) -> TrainingRows:
    names = ("rollout_log_probs", "advantages", "old_log_probs", "reference")
    tables = {name: None if (table := getattr(rows, name)) is None else table[list(index)] for name in names}
    return replace(rows, sequences=rows.sequences.select(list(index)), num_trained=num_trained, num_groups=1, **tables)


def found_sums(policy: CausalLM, rows: TrainingRows, algorithm: ReasoningAlgorithmConfig) -> tuple[Tensor, dict]:
    """Returns the gradient of the mean loss [D] and the statistics, as the actor forms them."""
    objective = Objective(policy, replace(algorithm, loss=Clipped()), TEMPERATURE, LONGEST, {})
    parameters = policy.parameters()
    passes = objective.passes(0, rows, torch.arange(len(rows)), "cpu")
    total = block_sums(passes, parameters, len(STATISTICS))
    size = sum(p.numel() for p in parameters)
    assert sum(one.weight for one in passes) == pytest.approx(total[size].item())
    return total[:size] / total[size], dict(zip(("weight", *STATISTICS), total[size:].tolist(), strict=True))


def plain_loss(policy: CausalLM, rows: TrainingRows, algorithm: ReasoningAlgorithmConfig) -> Tensor:
    """The mean loss, from the definitions: sequence by sequence without padding, token by token."""
    sums, weights, sets = [], 0.0, None
    if rows.sequences.support is not None:
        sizes, ids = rows.sequences.support
        sets = iter(ids.long().split(sizes[sizes > 0].tolist()))
    for i, completion in enumerate(rows.sequences.completions()):
        start, end = int(rows.sequences.prompt_lengths[i]), int(rows.sequences.lengths[i])
        logits = policy.model(input_ids=rows.sequences.tokens[i : i + 1, :end]).logits[0]
        of_row = []
        for t, token in enumerate(completion):
            if rows.sequences.given is not None and rows.sequences.given[i][t]:
                continue  # a tool's
            scores = logits[start - 1 + t].double()[1:] / TEMPERATURE  # without <pad>, token 0
            if sets is not None and rows.sequences.support[0][i, t]:
                inside = next(sets) - 1
                scores = torch.full_like(scores, -1e9).index_put((inside,), scores[inside])
            every = scores.log_softmax(0)
            log_prob, entropy = every[token - 1], -(every.exp() * every).sum()
            old = log_prob.detach() if rows.old_log_probs is None else rows.old_log_probs[i, t].double()
            ratio, advantage = (log_prob - old).exp(), float(rows.advantages[i, t])
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            if algorithm.tis_cap is not None:
                loss = loss * importance(policy, rows, algorithm, i, t)
            if rows.reference is not None:
                apart = rows.reference[i, t].double() - log_prob
                loss = loss + algorithm.kl_coef * (apart.exp() - 1 - apart)
            of_row.append(loss - algorithm.entropy_coef * entropy)
        level, total = algorithm.loss_level, torch.stack(of_row).sum()
        sums.append(total / len(of_row) if level is LossLevel.sequence else total)
        weights += {"token": len(of_row), "sequence": 1, "constant": LONGEST}[level]
    return torch.stack(sums).sum() / weights


def importance(policy: CausalLM, rows: TrainingRows, algorithm: ReasoningAlgorithmConfig, i: int, t: int) -> float:
    """The weight of a token, or of its whole completion, that corrects for the sampler."""
    old = rows.old_log_probs
    if old is None:
        old = all_log_probs(policy, rows.sequences, TEMPERATURE, 1000)
    difference = (old - rows.rollout_log_probs)[i].double()
    kept = difference[rows.sequences.mask[i]]
    level = algorithm.tis_level
    ratio = math.exp({"token": difference[t], "sequence": kept.sum(), "geometric": kept.mean()}[level])
    if algorithm.tis_masks and not algorithm.tis_floor <= ratio <= algorithm.tis_cap:
        return 0.0
    return min(max(ratio, algorithm.tis_floor), algorithm.tis_cap)


def gradient(loss: Tensor, policy: CausalLM) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, policy.parameters())])


# ---------------------------------------------------------------------------------------------------------------- loss
@pytest.mark.parametrize("level", LossLevel)
@pytest.mark.parametrize("support", [False, True], ids=["all tokens", "restricted"])
@pytest.mark.parametrize(("old_log_probs", "budget"), [(True, 17), (False, 4096)], ids=["several steps", "one step"])
def test_its_gradient_is_that_of_the_definition(policy, level, old_log_probs, budget, support):
    algorithm = ReasoningAlgorithmConfig(loss_level=level, tokens_per_microbatch=budget, **EVERYTHING)
    rows = rows_of(policy, old_log_probs, support)
    found, statistics = found_sums(policy, rows, algorithm)
    expected = gradient(plain_loss(policy, rows, algorithm), policy)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)
    alone = replace(algorithm, entropy_coef=0.0, kl_coef=0.0)  # what is reported is the clipped term
    assert statistics["loss"] / statistics["weight"] == pytest.approx(float(plain_loss(policy, rows, alone)), rel=1e-4)
    assert expected.abs().max() > 1e-2
    assert statistics["ratios"] == sum(COMPLETIONS)
    if old_log_probs:
        assert 0.1 < statistics["clipped"] / statistics["ratios"] < 0.9
    assert 0.1 < statistics["capped"] / statistics["ratios"] < 0.9


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("tis_level", "floor", "cap"), [("token", 0.9, 1.1), ("sequence", 0.5, 1.1), ("geometric", 0.95, 1.0)]
)
def test_importance_weights_are_per_token_or_per_completion(policy, tis_level, floor, cap, masks):
    tis = {"tis_level": RatioLevel(tis_level), "tis_floor": floor, "tis_cap": cap, "tis_masks": masks}
    algorithm = ReasoningAlgorithmConfig(tokens_per_microbatch=17, **EVERYTHING | tis)
    rows = rows_of(policy)
    found, statistics = found_sums(policy, rows, algorithm)
    torch.testing.assert_close(found, gradient(plain_loss(policy, rows, algorithm), policy), atol=2e-6, rtol=1e-4)
    assert 0.1 < statistics["capped"] / statistics["actions"] < 0.95
    assert statistics["weight"] == sum(COMPLETIONS)  # masked tokens count in the mean


def test_metrics_are_means_over_tokens_if_a_ratio_stands_for_a_completion():
    _, metrics = learned(tiny_math("algorithm.loss=gspo", "algorithm.drop_zero_variance_groups=false"), 1)
    assert metrics["losses/mismatch_ratio"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("level", LossLevel)
def test_what_a_tool_said_is_no_part_of_the_loss(policy, level):
    algorithm = ReasoningAlgorithmConfig(loss_level=level, tokens_per_microbatch=40, **EVERYTHING)
    rows = rows_of(policy, support=True)
    given = torch.tensor([[t % 3 == 0 and t < n - 1 for t in range(LONGEST)] for n in COMPLETIONS])
    rows = replace(rows, sequences=replace(rows.sequences, given=given))  # of tokens without a set
    found, statistics = found_sums(policy, rows, algorithm)
    torch.testing.assert_close(found, gradient(plain_loss(policy, rows, algorithm), policy), atol=2e-6, rtol=1e-4)
    assert statistics["ratios"] == sum(COMPLETIONS) - int(given.sum()) < sum(COMPLETIONS)


def test_the_expected_gradient_of_restricted_samples_is_that_of_the_restricted_policy(policy):
    """Over all completions of two tokens that top_k=3 leaves: E[ratio A] has the gradient of sum pi(x) A(x)."""
    prompts = tuple(Prompt(1, (5, 9, 3), sample) for sample in range(400))
    sampling = GenerationConfig(max_new_tokens=2, temperature=TEMPERATURE, top_k=3)
    generated = generate(ExactEngine(policy), GenerationBlock(prompts, sampling, 0, 0))
    distinct = list({tuple(row.tokens): row for row in generated}.values())
    probabilities = torch.tensor([math.exp(sum(row.log_probs)) for row in distinct])
    assert (len(distinct), float(probabilities.sum())) == (9, pytest.approx(1, abs=1e-6))
    advantages = torch.randn(9, generator=torch.Generator().manual_seed(1))
    columns = [[getattr(row, name) for row in distinct] for name in ("tokens", "support_sizes", "support_ids")]
    sequences = TokenBatch.of([prompts[0].tokens] * 9, columns[0], None, *columns[1:])
    old = torch.tensor([row.log_probs for row in distinct])
    expected_advantages = (9 * probabilities * advantages)[:, None].expand(-1, 2)  # a mean over nine rows
    rows = TrainingRows(sequences, old, expected_advantages, num_trained=9, num_groups=1, old_log_probs=old)
    unclipped = {"clip_low": 1.0, "clip_high": 1e3, "tis_cap": None}
    algorithm = ReasoningAlgorithmConfig(loss_level=LossLevel.sequence, loss=SequenceClipped(), **unclipped)
    changed = CausalLM(copy.deepcopy(policy.model), policy.codec)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    objective = Objective(changed, algorithm, TEMPERATURE, 2, {})
    passes = objective.passes(0, rows, torch.arange(9), "cpu")
    size = sum(p.numel() for p in changed.parameters())
    total = block_sums(passes, changed.parameters(), len(STATISTICS))
    value = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(distinct, advantages.double(), strict=True):
        logits = changed.model(input_ids=torch.tensor([[5, 9, 3, *row.tokens]])).logits[0, 2:4].double() / TEMPERATURE
        first, second = row.support_ids[:3].tolist(), row.support_ids[3:].tolist()
        log_prob = logits[0, first].log_softmax(0)[first.index(row.tokens[0])]
        log_prob = log_prob + logits[1, second].log_softmax(0)[second.index(row.tokens[1])]
        value = value + log_prob.exp() * advantage
    expected = gradient(-value, changed)
    assert (all_log_probs(changed, sequences, TEMPERATURE, 99) - old).abs().max() > 0.05
    torch.testing.assert_close(total[:size] / total[size], expected.float(), atol=2e-6, rtol=1e-4)
    assert expected.abs().max() > 1e-2


@pytest.mark.parametrize(("level", "options"), [(level, {}) for level in LossLevel] + [("token", EVERYTHING)])
def test_completions_without_an_advantage_count_in_the_mean_alone(policy, level, options):
    rows = rows_of(policy)
    rows = replace(rows, advantages=rows.advantages * torch.tensor([0.0, 1, 0, 1, 0, 0])[:, None])
    algorithm = ReasoningAlgorithmConfig(loss_level=level, tokens_per_microbatch=40, **options)
    found, _ = found_sums(policy, rows, algorithm)
    torch.testing.assert_close(found, gradient(plain_loss(policy, rows, algorithm), policy), atol=2e-6, rtol=1e-4)
    none = replace(rows, advantages=torch.zeros_like(rows.advantages))
    found, statistics = found_sums(policy, none, ReasoningAlgorithmConfig(loss_level=level))
    assert not found.any()
    assert statistics["weight"] == {"token": sum(COMPLETIONS), "sequence": 6, "constant": 6 * LONGEST}[level]


@pytest.mark.parametrize(("level", "options"), [("token", {}), ("sequence", EVERYTHING)])
def test_completions_that_are_looked_at_only_count_in_the_metrics_alone(policy, level, options):
    algorithm = ReasoningAlgorithmConfig(loss_level=level, tokens_per_microbatch=40, **options)
    whole = rows_of(policy)
    few, many = chosen(whole, range(4), 4), replace(whole, num_trained=4)
    (expected, of_few), (found, of_all) = found_sums(policy, few, algorithm), found_sums(policy, many, algorithm)
    assert torch.equal(found, expected)
    assert (of_all["loss"], of_all["weight"]) == (of_few["loss"], of_few["weight"])
    _, everything = found_sums(policy, whole, algorithm)
    for name in ("ratios", "actions", "clipped"):
        assert of_few[name] < of_all[name] == everything[name]
    for name in ("entropy", "approx_kl", "mismatch", "mismatch_kl", "ratio", "capped", "kl"):
        assert of_all[name] == pytest.approx(everything[name], rel=1e-4)


def test_of_many_rows_without_a_gradient_a_few_are_read_for_all_of_them(policy, monkeypatch):
    one = rows_of(policy)
    rows = chosen(one, [0, 1] + [3] * 62, 1)  # the second and those behind it are alike
    rows = replace(rows, advantages=rows.advantages * torch.tensor([1.0, 0] + [1] * 62)[:, None])
    read, log_probs = [], CausalLM.log_probs
    monkeypatch.setattr(
        CausalLM,
        "log_probs",
        lambda self, batch, *a, **k: read.append(len(batch.lengths)) or log_probs(self, batch, *a, **k),
    )
    found, sums = found_sums(policy, rows, ReasoningAlgorithmConfig(tokens_per_microbatch=40))
    assert sum(read) <= 1 + 8
    alone, of_one = found_sums(policy, chosen(one, [0], 1), ReasoningAlgorithmConfig())
    assert torch.equal(found, alone)
    assert sums["weight"] == of_one["weight"] == COMPLETIONS[0]
    trained_on = found_sums(policy, replace(rows, num_trained=64), ReasoningAlgorithmConfig())[1]
    assert trained_on["weight"] == COMPLETIONS[0] + COMPLETIONS[1] + 62 * COMPLETIONS[3]
    assert trained_on["ratios"] == trained_on["weight"]  # every row has a gradient, but for one


# ---------------------------------------------------------------------------------------------------------------- rows
def round_of(correct: list[list[bool]], lengths: list[list[int]], ended: list[list[bool]], first: int) -> Round:
    """Two completions of each prompt; token 10 p + i is in those of prompt p, with the log-prob -(10 p + i) / 100."""
    prompts = [[first + k] for k in range(len(correct)) for _ in range(2)]
    rows = [[10 * (first + k) + i] * n for k, of_group in enumerate(lengths) for i, n in enumerate(of_group)]
    problems = [Problem(first + k, "?", "1", None, "text", "own") for k in range(len(correct))]
    table, log_probs = torch.tensor(correct), [[-token / 100 for token in row] for row in rows]
    made = completions(problems, prompts, rows, ended=list(itertools.chain(*ended)), log_probs=log_probs)
    return Round(made, Rewards(table.float(), table))


FIRST = round_of([[True, False], [True, True]], [[3, 1], [2, 2]], [[True, True], [True, False]], 1)
SECOND = round_of([[False, True], [False, False]], [[1, 5], [4, 4]], [[True, False], [True, True]], 3)


def of_prompts(rows: TrainingRows) -> tuple[list[int], list[int]]:
    """Returns the prompts of what is trained on, and of what is looked at only."""
    every = rows.sequences.tokens[:, 0].tolist()
    return every[: rows.num_trained], every[rows.num_trained :]


def test_groups_that_do_not_differ_leave_the_loss():
    rows = training_rows([FIRST], ReasoningAlgorithmConfig(group_size=2), None)
    assert (of_prompts(rows), rows.num_groups) == (([1, 1], [2, 2]), 1)
    every = training_rows([FIRST], ReasoningAlgorithmConfig(group_size=2, drop_zero_variance_groups=False), None)
    assert (of_prompts(every), every.num_groups) == (([1, 1, 2, 2], []), 1)
    assert every.advantages[2:].abs().max() == 0
    shaped = Round(FIRST.generation, Rewards(torch.tensor([[1.0, 1.0], [1.0, 1.2]]), FIRST.reward.raw))
    assert of_prompts(training_rows([shaped], ReasoningAlgorithmConfig(group_size=2), None)) == ([1, 1], [2, 2])
    uniform = round_of([[True, True]], [[1, 1]], [[True, True]], 1)
    none = training_rows([uniform], ReasoningAlgorithmConfig(group_size=2), None)
    assert (of_prompts(none), none.num_groups) == (([], [1, 1]), 0)


def test_rounds_are_joined_in_order_with_the_groups_that_were_chosen():
    rows = training_rows([FIRST, SECOND], ReasoningAlgorithmConfig(group_size=2), [(1, 0), (0, 0)])
    assert of_prompts(rows) == ([1, 1, 3, 3], [2, 2, 4, 4])
    assert rows.sequences.completions()[:4] == [[10, 10, 10], [11], [30], [31] * 5]
    assert rows.rollout_log_probs.shape == rows.advantages.shape == (8, 5)
    assert rows.rollout_log_probs[3].tolist() == pytest.approx([-0.31] * 5)
    assert rows.rollout_log_probs[0].tolist() == pytest.approx([-0.1, -0.1, -0.1, 0, 0])
    assert rows.num_groups == 2


def test_completions_that_were_cut_off_leave_the_loss_but_not_the_baseline():
    algorithm = ReasoningAlgorithmConfig(group_size=2, mask_truncated=True, scale_by_std=False)
    rows = training_rows([SECOND], algorithm, None)
    assert rows.sequences.completions()[: rows.num_trained] == [[30]]
    assert float(rows.advantages[0, 0]) == -0.5  # the one that was cut off was right
    cut = training_rows([round_of([[True, False]], [[1, 1]], [[False] * 2], 1)], algorithm, None)
    assert (cut.num_trained, len(cut), cut.num_groups) == (0, 2, 0)


def test_a_critics_advantages_and_other_log_probs_stay_with_their_completions():
    tables = [torch.arange(20.0).reshape(4, 5) + 100 * k for k in range(3)]
    done = Round(FIRST.generation, FIRST.reward, LogProbs(tables[0], 0), LogProbs(tables[1], 0), tables[2])
    rows = training_rows([done], ReasoningAlgorithmConfig(group_size=2), [(0, 1)])  # widths 5, the rows need 3
    for found, table in zip((rows.old_log_probs, rows.reference, rows.advantages), tables, strict=True):
        assert found is not None
        assert torch.equal(found, table[[2, 3, 0, 1], :3])


# ------------------------------------------------------------------------------------------------------------- rewards
def test_long_completions_lose_up_to_the_penalty_over_the_last_tokens():
    overlong = ["reward.overlong_tokens=4", "reward.overlong_penalty=0.8", "generation.max_new_tokens=10"]
    stage = RewardStage(StageConfig(compose_math(overlong), ""))
    stage.setup(solo_context([0]))
    lengths, ended = [3, 6, 7, 9, 10, 10], [True] * 5 + [False]
    texts, problem = ("#6", "#6", "#6", "#5", "#6", "#6"), Problem(1, "7+8-9=", "6", None, "sum", "sum2-2-9")
    made = completions([problem], [[4]] * 6, [[5] * n for n in lengths], ended=ended, texts=texts)
    output = stage.run(StepContext(0), {0: [made]})
    found = output.blocks[0]
    assert isinstance(found, Rewards)
    # right - penalty x (length - 6) / 4; an answer that was cut off earns nothing
    assert found.rewards[0].tolist() == pytest.approx([1, 1, 1 - 0.2, -0.6, 1 - 0.8, -0.8])
    assert found.raw[0].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------------- microbatches
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 400))
def test_every_row_is_packed_once_within_the_budget(lengths, budget):
    batches = dynamic_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) * max(lengths[row] for row in rows) <= budget
    # sorted: no sequence of a batch is longer than any of the one before
    for one, other in itertools.pairwise(batches):
        assert min(lengths[row] for row in one) >= max(lengths[row] for row in other)


def test_a_sequence_longer_than_the_budget_is_named():
    with pytest.raises(ConfigError, match=r"tokens_per_microbatch is 40, but sequence 1 has 41"):
        dynamic_batches([3, 41], 40)


# ------------------------------------------------------------------------------------------------------------ balance
@pytest.mark.parametrize(
    "overrides",
    [[], ["algorithm.kl_coef=0.1", "policy.lora.rank=4", *TWO_STEPS], ["generation.top_p=0.9", *TWO_STEPS]],
)
def test_blocks_that_change_their_workers_change_no_bit(monkeypatch, overrides):
    monkeypatch.setattr(actor_stage, "balanced_owners", lambda loads, owners: [*owners[1:], owners[0]])
    config = tiny_math("algorithm.drop_zero_variance_groups=false", *overrides)
    (one, alone), (two, both) = (learned(config, number) for number in (1, 2))
    assert one == two
    assert {k: v for k, v in alone.items() if "losses" in k} == {k: v for k, v in both.items() if "losses" in k}
