"""Sharded steps equal unsharded ones, whoever owns the rows; checkpoints go from either learner to the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from sharding import Job, Worker, alone, net, take_steps, together

from rlinf_embodied.errors import CheckpointError, ConfigError, ObjectiveError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup


@pytest.fixture
def solo():
    """A group of one; torch's default group is left as it was found."""
    yield SoloGroup()
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_close(one: dict, other: dict) -> None:
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


# the second worker makes one pass where the first makes six; the third has no row at all and slices without entries
@pytest.mark.parametrize(("size", "owners"), [(2, (0, 0, 1, 1)), (3, (0, 1, 2, 0))])
def test_three_steps_equal_those_of_one_process_that_shards_nothing(tmp_path, size, owners):
    job = Job(owners=owners, veto=(1,), steps=(0.1, 0.1, 0.05, 0.02))
    weights, steps, moments = alone(job)
    workers = together(job, size, tmp_path)
    assert steps[1][1] is None
    assert steps[0][1] > job.max_grad_norm  # the first one is clipped
    for worker in workers:
        assert_close(worker["weights"], weights)
        for (statistics, norm), (expected, expected_norm) in zip(worker["found"], steps, strict=True):
            torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-6)
            assert norm == (None if expected_norm is None else pytest.approx(expected_norm, rel=1e-5))
        assert all(torch.equal(worker["weights"][name], workers[0]["weights"][name]) for name in weights)
    assert_close(workers[0]["moments"], moments)
    assert workers[0]["moments"]["steps"].item() == 3
    assert all(worker["moments"] == {} for worker in workers[1:])


def test_a_worker_holds_slices_only(tmp_path):
    whole = dict(net().named_parameters())
    workers = together(Job(owners=(0, 1, 0, 1), steps=(0.1,)), 2, tmp_path)
    for name, parameter in whole.items():
        slices = [worker["slices"][name] for worker in workers]
        assert sum(s.numel() for s in slices) == parameter.numel()
        assert max(s.numel() for s in slices) <= -(-len(parameter) // 2) * parameter[0].numel()
        assert torch.equal(torch.cat(slices), workers[0]["weights"][name])  # what the view was filled from
    assert torch.equal(workers[0]["weights"]["frozen.weight"], whole["frozen.weight"])


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    through = together(Job(owners=(0, 0, 1, 1)), 2, tmp_path / "a")
    resumed = together(Job(owners=(0, 0, 1, 1), restart=2), 2, tmp_path / "b")
    for one, other in zip(through, resumed, strict=True):
        for name, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][name]), name
    assert all(torch.equal(tensor, resumed[0]["moments"][n]) for n, tensor in through[0]["moments"].items())


def test_a_checkpoint_of_one_learner_is_one_of_the_other(tmp_path):
    weights, _, moments = alone(Job(owners=(0,) * 4, steps=(0.1,)))
    going_on = Job(owners=(0, 1, 1, 0), steps=(0.05, 0.02), start={"weights": weights, "moments": moments})
    expected, _, _ = alone(going_on)
    workers = together(going_on, 2, tmp_path)
    assert_close(workers[0]["weights"], expected)
    back = Job(owners=(0,) * 4, steps=(0.1,), start={n: workers[0][n] for n in ("weights", "moments")})
    assert alone(back)[2]["steps"].item() == 4


# ------------------------------------------------------------------------------------------------- a worker of its own
def test_a_single_worker_makes_the_same_steps(solo):
    job = Job(owners=(0,) * 4)
    weights, steps, moments = alone(job)
    worker = Worker(job, 0, solo)
    found = take_steps(worker.learner, worker.model, job, 0, range(3))
    assert_close(worker.view.state_dict(), weights)
    assert_close(worker.learner.export_state(), moments)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in steps], rel=1e-5)


def test_weights_are_adopted_from_the_view_and_published_to_it(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    other = net(seed=5)
    worker.view.load_state_dict(other.state_dict())
    worker.learner.adopt()
    for parameter in worker.view.parameters():
        parameter.data.zero_()
    worker.learner.publish()
    trained = {name for name, parameter in other.named_parameters() if parameter.requires_grad}
    for name, parameter in worker.view.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name) if name in trained else torch.zeros_like(parameter))


def test_a_step_that_is_not_finite_changes_nothing(solo):
    job = Job(owners=(0,) * 4, scale=float("inf"))
    worker = Worker(job, 0, solo)
    before = copy.deepcopy(worker.view.state_dict())
    with pytest.raises(ObjectiveError, match=r"norm is (nan|inf).*nothing was changed"):
        take_steps(worker.learner, worker.model, job, 0, range(1))
    worker.learner.publish()
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.view.state_dict().items())
    assert worker.learner.export_state()["steps"].item() == 0


def test_an_empty_minibatch_makes_no_step(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    statistics, norm = worker.learner.step({2: torch.arange(0)}, lambda block, index: [])
    assert (statistics.tolist(), norm) == ([0.0, 0.0], None)


def test_moments_of_other_parameters_are_refused(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    wrong = {"steps": torch.tensor([1]), "mean": torch.zeros(3), "square": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="the checkpoint is of another policy"):
        worker.learner.import_state(wrong)


def test_threads_of_one_process_cannot_shard():
    with pytest.raises(ConfigError, match=r"the 2 workers of the actor are threads.*cluster.session=ray"):
        Worker(Job(owners=(0, 0, 1, 1)), 0, ThreadGroup.make(2)[0])
