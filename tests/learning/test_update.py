"""Minibatches over blocks: the slices of an epoch cover each block once, and gradients add up to the joint one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rlinf_embodied.learning.gradients import LossSums, Pass, Passes, block_sums, microbatches
from rlinf_embodied.learning.groups import Group, SoloGroup, ThreadGroup
from rlinf_embodied.learning.learner import AdamSettings, Learner, Step
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import fit, minibatches, policy_metrics

SIZES = {0: 5, 1: 0, 2: 8, 3: 3}
STATISTICS = ("loss", "rows")


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def data() -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {block: torch.randn(size, 4, generator=draw) for block, size in SIZES.items()}


def passes_of(model: nn.Linear) -> Passes:
    columns = data()

    def sums(rows: Tensor) -> LossSums:
        errors = (model(rows) - 1.0).square().sum()
        return LossSums(
            errors, torch.tensor(float(len(rows))), torch.stack([errors.detach(), torch.tensor(float(len(rows)))])
        )

    def passes(rows: Mapping[int, Tensor]) -> list[Pass]:  # a block may come in parts
        parts = [columns[block][part] for block, index in rows.items() for part in index.split(3)]
        return [Pass(float(len(part)), partial(sums, part)) for part in parts]

    return passes


def learner_of(model: nn.Linear, group: Group | None = None, owners: tuple[int, ...] = (0,) * 4) -> Learner:
    settings = AdamSettings(0.1, (0.9, 0.999), 1e9)
    return Learner(list(model.parameters()), settings, STATISTICS, Reducer(group or SoloGroup(), owners))


def all_rows() -> dict[int, Tensor]:
    return {block: torch.arange(size) for block, size in SIZES.items()}


def flat(model: nn.Linear) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# -------------------------------------------------------------------------------------------------------------- a step
def test_a_step_is_one_of_adam_on_the_mean_of_the_joint_batch(model) -> None:
    expected = nn.Linear(4, 1)
    expected.load_state_dict(model.state_dict())
    step = learner_of(model).step(all_rows(), passes_of(model))
    loss = (expected(torch.cat([*data().values()])) - 1.0).square().sum()
    (loss / 16).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
    torch.optim.AdamW(expected.parameters(), 0.1, weight_decay=0.0).step()
    assert step.weight == step.sums["rows"] == 16
    assert step.sums["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step.norm == pytest.approx(float(norm), rel=1e-5)
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-4, atol=1e-5)


def test_blocks_that_were_added_as_they_came_make_the_same_step(model) -> None:
    other = nn.Linear(4, 1)
    other.load_state_dict(model.state_dict())
    at_once, streamed = learner_of(model), learner_of(other)
    for _ in range(2):
        expected = at_once.step(all_rows(), passes_of(model))
        streamed.start()
        for block in (2, 0, 3):
            streamed.add(block, all_rows()[block], passes_of(other))
        assert streamed.step(all_rows(), passes_of(other)) == expected
    assert torch.equal(flat(model), flat(other))


def test_fast_sums_take_the_rows_of_all_blocks_in_one_pass_and_make_about_the_same_step(model) -> None:
    other = nn.Linear(4, 1)
    other.load_state_dict(model.state_dict())
    fast = learner_of(other)
    fast.reducer.exact = False
    calls = []
    passes = lambda rows: calls.append(dict.fromkeys(rows)) or passes_of(other)(rows)  # noqa: E731
    for _ in range(2):
        expected = learner_of(model).step(all_rows(), passes_of(model))
        found = fast.step(all_rows(), passes)
        assert found.weight == expected.weight
    assert calls == [dict.fromkeys(block for block, size in SIZES.items() if size)] * 2
    fast.add(2, all_rows()[2], passes)  # as it came; the others follow in one pass
    assert fast.step(all_rows(), passes).weight == 16
    assert [list(call) for call in calls[2:]] == [[2], [b for b, size in SIZES.items() if size and b != 2]]


def test_rows_of_blocks_are_cut_into_microbatches() -> None:
    rows = {0: torch.arange(5), 1: torch.arange(0), 2: torch.arange(3)}
    cut = lambda most: [{b: i.tolist() for b, i in part.items()} for part in microbatches(rows, most)]  # noqa: E731
    assert cut(None) == [{0: [0, 1, 2, 3, 4], 2: [0, 1, 2]}]
    assert cut(3) == [{0: [0, 1, 2]}, {0: [3, 4], 2: [0]}, {2: [1, 2]}]
    assert cut(8) == cut(None)
    assert microbatches({1: torch.arange(0)}, None) == []


def test_what_a_failed_iteration_added_is_forgotten(model) -> None:
    learner, rows = learner_of(model), all_rows()
    learner.add(0, rows[0], passes_of(model))
    learner.start()
    assert learner.step(rows, passes_of(model)).weight == 16


def test_workers_get_the_bits_of_one_and_stay_equal(model) -> None:
    owners = (0, 1, 0, 1)
    groups = ThreadGroup.make(2, timeout_s=30)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def worker(rank: int) -> tuple[Tensor, list[Step], dict[str, Tensor]]:
        own = nn.Linear(4, 1)
        own.load_state_dict(start)
        rows = {b: index for b, index in all_rows().items() if owners[b] == rank}
        learner = learner_of(own, groups[rank], owners)
        steps = [learner.step(rows, passes_of(own)) for _ in range(3)]
        return flat(own), steps, learner.export_state()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(worker, range(2))
    alone = learner_of(model)
    steps = [alone.step(all_rows(), passes_of(model)) for _ in range(3)]
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], flat(model))
    assert first[1] == second[1] == steps
    assert {name: t.tolist() for name, t in first[2].items()} == {
        n: t.tolist() for n, t in alone.export_state().items()
    }
    assert second[2] == {}, "a checkpoint needs the state of one worker, so that no other copies it"


@pytest.mark.parametrize("reason", ["early_stop", "nothing"])
def test_no_step_is_made_where_it_is_forbidden_or_there_is_nothing_to_learn_from(model, reason: str) -> None:
    before = flat(model)
    rows = all_rows() if reason == "early_stop" else {block: torch.arange(0) for block in SIZES}
    seen = []

    def early_stop(step: Step) -> bool:
        seen.append(step)
        return True

    step = learner_of(model).step(rows, passes_of(model), early_stop)
    assert step.norm is None
    assert torch.equal(flat(model), before)
    assert [replace(one, stopped=True) for one in seen] == ([step] if reason == "early_stop" else [])


def test_a_gradient_of_zero_makes_no_step_and_ends_no_update(model) -> None:
    learner = learner_of(model)
    learner.step(all_rows(), passes_of(model))  # moments, which would move the weights
    before, state = flat(model), deepcopy(learner.export_state())
    one = Pass(2.0, lambda: LossSums(flat_sum(model) * 0.0, torch.tensor(2.0), torch.zeros(len(learner.statistics))))
    fitted = fit(learner, [{b: torch.arange(1) for b in SIZES}] * 2, lambda rows: [one])
    assert torch.equal(flat(model), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in learner.export_state().items())
    assert (fitted.norms, fitted.weight, fitted.stopped) == ([], 2 * 2 * len(SIZES), False)


def test_parameters_that_a_loss_does_not_reach_get_zeros() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    one = Pass(1.0, lambda: LossSums((used * 2).sum(), torch.tensor(1.0), torch.zeros(1)))
    assert block_sums([one], [unused, used], 1).tolist() == [0, 0, 0, 2, 2, 1, 0]


def test_a_pass_that_does_not_train_adds_its_weight_and_statistics_alone() -> None:
    parameter, graphs = nn.Parameter(torch.ones(2)), []

    def run() -> LossSums:
        loss = (parameter * 3).sum()
        graphs.append(loss.requires_grad)
        return LossSums(loss, torch.tensor(2.0), torch.tensor([7.0]))

    assert block_sums([Pass(2.0, run, trains=False)], [parameter], 1).tolist() == [0, 0, 2, 7]
    assert block_sums([Pass(2.0, run), Pass(2.0, run, trains=False)], [parameter], 1).tolist() == [3, 3, 4, 14]
    assert graphs == [False, True, False]


# ----------------------------------------------------------------------------------------------------------- an update
def test_an_update_ends_with_a_veto_and_passes_over_empty_minibatches(model) -> None:
    rows, nothing = all_rows(), {block: torch.arange(0) for block in SIZES}
    seen = []

    def third(step: Step) -> bool:
        seen.append(step)
        return len(seen) == 3

    fitted = fit(learner_of(model), [rows, nothing, rows, rows, rows], passes_of(model), third)
    assert (len(seen), len(fitted.norms), fitted.weight, fitted.stopped) == (3, 2, 32, True)


def test_metrics_of_a_policy_have_their_own_denominators(model) -> None:
    learner = learner_of(model)
    learner.statistics = ("loss", "approx_kl", "clipped", "ratios", "entropy", "actions")
    values = torch.tensor([-3.0, 0.5, 2.0, 10.0, 8.0, 5.0])
    one = Pass(6.0, lambda: LossSums(flat_sum(model), torch.tensor(6.0), values))
    found = policy_metrics(fit(learner, [{b: torch.arange(1) for b in SIZES}] * 2, lambda rows: [one]))
    norm = found.pop("losses/grad_norm")
    assert norm == pytest.approx(5**0.5 / 6)  # of five ones in each of four blocks, over 4 x 6
    assert found == pytest.approx(
        {"losses/policy_loss": -0.5, "losses/approx_kl": 0.1, "losses/clipfrac": 0.2, "losses/entropy": 1.6}
    )


def flat_sum(model: nn.Linear) -> Tensor:
    return torch.stack([p.sum() for p in model.parameters()]).sum()


# --------------------------------------------------------------------------------------------------------- minibatches
SHUFFLE = (7, "policy", 3)


@given(size=st.integers(0, 40), parts=st.integers(1, 9), epoch=st.integers(0, 5), block=st.integers(0, 5))
def test_slices_partition_a_block_evenly(size: int, parts: int, epoch: int, block: int) -> None:
    cut = [rows[block] for rows in minibatches(SHUFFLE, {block: size}, parts, epoch + 1)][-parts:]
    assert len(cut) == parts
    assert sorted(torch.cat(cut).tolist()) == list(range(size))
    lengths = [len(part) for part in cut]
    assert max(lengths) - min(lengths) <= 1
