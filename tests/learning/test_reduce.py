from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_embodied.config import Reduction
from rlinf_embodied.errors import HangError
from rlinf_embodied.learning.balance import balanced_owners, imbalance, moved
from rlinf_embodied.learning.groups import Group, SoloGroup, ThreadGroup
from rlinf_embodied.learning.reduce import BlockSum, Reducer, make_reducer


def on_threads(size: int, work: Callable[[Group], object], timeout_s: float = 20.0) -> list[object]:
    """Returns what `work` returned or raised on each rank of a new group."""
    results: list[object] = [None] * size

    def member(group: ThreadGroup) -> None:
        try:
            results[group.rank] = work(group)
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[group.rank] = error

    threads = [threading.Thread(target=member, args=(group,)) for group in ThreadGroup.make(size, timeout_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def make_blocks(num_blocks: int, seed: int = 0) -> dict[int, Tensor]:
    """Returns vectors of very unlike magnitudes, so that another order of addition gives other bits."""
    draw = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 5, (num_blocks, 1), generator=draw)
    return dict(enumerate(torch.randn(num_blocks, 64, generator=draw) * scale))


@st.composite
def ownerships(draw: st.DrawFn) -> list[int]:
    """Any ownership of 1 to 13 blocks by 1 to 4 ranks in which nobody is left out."""
    size = draw(st.integers(1, 4))
    others = draw(st.lists(st.integers(0, size - 1), min_size=0, max_size=13 - size))
    return draw(st.permutations([*range(size), *others]))


@settings(deadline=None, max_examples=60)
@given(ownerships(), st.randoms())
def test_an_exact_sum_has_the_same_bits_for_every_ownership_and_order(owners, shuffled):
    blocks = make_blocks(len(owners))
    alone = Reducer(SoloGroup(), [0] * len(owners)).sum_blocks(blocks)
    orders = [[b for b, owner in enumerate(owners) if owner == rank] for rank in range(max(owners) + 1)]
    for order in orders:
        shuffled.shuffle(order)

    def work(group: Group) -> tuple[Tensor, dict[int, Tensor]]:
        reducer = Reducer(group, owners)
        total = BlockSum(reducer)
        for block in orders[group.rank]:
            total.add([block], blocks[block].clone())
        return total.total(), reducer.gather_blocks({block: blocks[block] for block in orders[group.rank]})

    for total, gathered in on_threads(max(owners) + 1, work):
        assert torch.equal(total, alone)
        assert list(gathered) == list(blocks)
        assert all(torch.equal(gathered[block], blocks[block]) for block in blocks)


def test_the_brackets_of_the_tree_are_those_of_the_diagram():
    blocks = make_blocks(5)
    expected = ((blocks[0] + blocks[1]) + (blocks[2] + blocks[3])) + blocks[4]
    assert torch.equal(Reducer(SoloGroup(), [0] * 5).sum_blocks(blocks), expected)
    from_left = sum(blocks[k] for k in range(5))
    assert not torch.equal(from_left, expected), "these numbers would not show another order"


@pytest.mark.parametrize("num_blocks", [5, 64, 100])
def test_a_sum_of_blocks_that_come_one_by_one_keeps_a_logarithm_of_them(num_blocks):
    """In order, the tree holds a tensor per set bit of the number of blocks so far, and the one that comes in."""
    blocks = make_blocks(num_blocks)
    for exact, most in ((True, num_blocks.bit_length() + 1), (False, 2)):
        reducer, alive, largest = Reducer(SoloGroup(), [0] * num_blocks, exact), weakref.WeakSet(), 0
        total = BlockSum(reducer)
        for block, tensor in blocks.items():
            own = tensor.clone()
            alive.add(own)
            total.add([block], own)
            del own
            largest = max(largest, len(alive))
        assert largest <= most
        result = total.total()
        if exact:
            assert torch.equal(result, reducer.sum_blocks(blocks))


@pytest.mark.parametrize(
    ("choice", "device", "exact"),
    [
        (Reduction.auto, "cpu", True),
        (Reduction.auto, "cuda:0", False),
        (Reduction.exact, "cuda:0", True),
        (Reduction.fast, "cpu", False),
    ],
)
def test_sums_are_exact_on_a_cpu_and_fast_on_an_accelerator_by_default(choice, device, exact):
    assert make_reducer(choice, SoloGroup(), [0], device).exact is exact


def test_only_roots_of_whole_subtrees_travel():
    sent = []

    class Counting(ThreadGroup):
        def exchange(self, tensors, counts):
            sent.append((self.rank, len(tensors), tuple(counts)))
            return super().exchange(tensors, counts)

    owners, blocks = [0, 0, 0, 0, 1, 1, 1, 1], make_blocks(8)

    def work(group: ThreadGroup) -> Tensor:
        group.__class__ = Counting
        return Reducer(group, owners).sum_blocks({b: blocks[b] for b in range(8) if owners[b] == group.rank})

    on_threads(2, work)
    assert sorted(sent) == [(0, 1, (1, 1)), (1, 1, (1, 1))]


@settings(deadline=None, max_examples=20)
@given(ownerships())
def test_a_fast_sum_is_close_to_the_exact_one_and_the_same_everywhere(owners):
    blocks = make_blocks(len(owners))
    exact = Reducer(SoloGroup(), [0] * len(owners)).sum_blocks({b: t.double() for b, t in blocks.items()})

    def work(group: Group) -> Tensor:
        own = {block: blocks[block] for block, owner in enumerate(owners) if owner == group.rank}
        return Reducer(group, owners, exact=False).sum_blocks(own)

    results = on_threads(max(owners) + 1, work)
    for result in results:
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-6 * float(exact.abs().max() + 1e4))
        assert torch.equal(result, results[0])


def test_sums_leave_their_inputs_alone_and_give_each_thread_its_own_result():
    blocks = make_blocks(3)
    copies = {block: tensor.clone() for block, tensor in blocks.items()}

    def work(group: Group) -> Tensor:
        own = {0: blocks[0], 2: blocks[2]} if group.rank == 0 else {1: blocks[1]}
        total = Reducer(group, [0, 1, 0]).sum_blocks(own)
        result = Reducer(group, [0, 1, 0], exact=False).sum_blocks(own)
        return total.clone(), total.add_(1e9), result

    first, second = on_threads(2, work)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert all(torch.equal(blocks[block], copies[block]) for block in blocks)


def test_a_missing_thread_is_a_hang_that_names_who_waits_where():
    def work(group: Group) -> Tensor | None:
        return None if group.rank == 1 else group.all_reduce(torch.ones(2))

    waiting, absent, other = on_threads(3, work, timeout_s=0.2)
    assert absent is None
    for rank, error in ((0, waiting), (2, other)):
        assert isinstance(error, HangError)
        assert f"rank {rank} of 3 waited 0.2 s for the others in all_reduce" in str(error)


def test_passing_blocks_of_others_is_a_broken_invariant():
    reducer = Reducer(SoloGroup(), [0, 0])
    with pytest.raises(AssertionError, match="rank 0 owns blocks"):
        reducer.sum_blocks({0: torch.ones(1)})
    with pytest.raises(AssertionError, match="at least once"):
        Reducer(SoloGroup(), [0, 1])


# ------------------------------------------------------------------------------------------------------------ balance
def test_tokens_per_worker_are_within_five_percent_for_lognormal_lengths() -> None:
    owners, before = [rank for rank in range(8) for _ in range(4)], []
    for seed in range(50):
        lengths = np.random.default_rng(seed).lognormal(6.0, 1.0, (32, 64)).sum(1).tolist()
        before.append(imbalance(lengths, owners))
        assert imbalance(lengths, balanced_owners(lengths, owners)) <= 1.05
    assert np.mean(before) > 1.1


def test_equal_blocks_stay_and_every_rank_keeps_one() -> None:
    assert balanced_owners([1.0] * 4, [1, 0, 1, 0]) == [1, 0, 1, 0]
    assert set(balanced_owners([9.0, 0.0, 0.0, 0.0], [0, 0, 1, 2])) == {0, 1, 2}


def test_blocks_arrive_as_they_were() -> None:
    before, after = [0, 0, 0, 1, 2], [0, 1, 2, 0, 2]
    rows = [(number, torch.randn(number + 1)) for number in range(5)]
    own = lambda rank, owners: {b: rows[b] for b, owner in enumerate(owners) if owner == rank}  # noqa: E731
    found = on_threads(3, lambda group: moved(group, before, after, own(group.rank, before)))
    for rank, blocks in enumerate(found):
        expected = own(rank, after)
        assert isinstance(blocks, dict)
        assert list(blocks) == list(expected)
        assert all(torch.equal(blocks[b][1], expected[b][1]) for b in expected)
