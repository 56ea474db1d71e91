"""Sharded steps equal unsharded ones, whoever owns the rows; checkpoints go from either learner to the other."""

from __future__ import annotations

import copy

import pytest
import torch
from sharding import Job, Worker, alone, net, take_steps, together

from rlinf_embodied.errors import CheckpointError, ConfigError, ObjectiveError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.learning.learner import Step


@pytest.fixture
def solo(no_group_stays) -> SoloGroup:
    """A group of one."""
    return SoloGroup()


def assert_close(one: dict, other: dict) -> None:
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


# ------------------------------------------------------------------------------------------------------- two or three
UNEVEN = {"early_stop": (1,), "steps": (0.1, 0.1, 0.05, 0.02)}
_FIRST = Job(owners=(0,) * 4, steps=(0.1,))


@pytest.fixture(scope="module")
def first_step():
    """Weights and moments after a step that nothing is sharded in."""
    weights, _, moments = alone(_FIRST)
    return {"weights": weights, "moments": moments}


@pytest.fixture(scope="module")
def two(tmp_path_factory, first_step):
    """What two processes make of several jobs; the second worker makes one pass where the first makes six."""
    jobs = {
        "through": Job(owners=(0, 0, 1, 1), **UNEVEN),
        "resumed": Job(owners=(0, 0, 1, 1), restart=2, **UNEVEN),
        "going on": Job(owners=(0, 1, 1, 0), steps=(0.05, 0.02), start=first_step),
    }
    return together(jobs, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """What three processes make of a job; one has no row at all, and of some parameters no entry."""
    return together({"through": Job(owners=(0, 1, 2, 0), **UNEVEN)}, 3, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("processes", ["two", pytest.param("three", marks=pytest.mark.slow)])
def test_steps_equal_those_of_one_process_that_shards_nothing(request, processes):
    workers = [jobs["through"] for jobs in request.getfixturevalue(processes)]
    weights, steps, moments = alone(Job(owners=(0,) * 4, **UNEVEN))
    norms = [step.norm for step in steps]
    assert norms[1] is None
    assert norms[0] > Job(owners=()).max_grad_norm > norms[-1]  # clipped, and not clipped
    for worker in workers:
        assert_close(worker["weights"], weights)
        for found, expected in zip(worker["found"], steps, strict=True):
            assert found.weight == expected.weight
            assert found.sums == pytest.approx(expected.sums, rel=1e-5, abs=1e-6)
            assert found.norm == (None if expected.norm is None else pytest.approx(expected.norm, rel=1e-5))
        assert all(torch.equal(worker["weights"][name], workers[0]["weights"][name]) for name in weights)
    assert_close(workers[0]["moments"], moments)
    assert workers[0]["moments"]["steps"].item() == 3
    assert all(worker["moments"] == {} for worker in workers[1:])


def test_a_worker_holds_slices_and_the_view_what_they_make_together(two):
    for name, parameter in net().named_parameters():
        slices = [worker["through"]["slices"][name] for worker in two]
        assert [len(s) for s in slices] == [-(-len(parameter) // 2), len(parameter) // 2]
        assert torch.equal(torch.cat(slices), two[0]["through"]["weights"][name])
        changed = not torch.equal(torch.cat(slices), parameter)
        assert changed == (not name.startswith("frozen"))


def test_parts_for_a_snapshot_are_slices_that_make_up_the_whole_state(two, solo):
    """Nothing passes through one worker: each gives what it holds."""
    parts = [worker["through"]["part"] for worker in two]
    whole = two[0]["through"]["moments"]
    sizes = [sum(tensor.numel() for name, tensor in part.items() if name != "steps") for part in parts]
    assert sum(sizes) == len(whole["mean"]) + len(whole["square"])
    assert max(sizes) < 0.7 * sum(sizes)
    joined = Worker(Job(owners=(0,)), 0, solo).learner.joined(parts)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


def test_a_resumed_run_continues_bit_for_bit(two):
    for jobs in two:
        through, resumed = jobs["through"], jobs["resumed"]
        assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in through["weights"].items())
        assert all(torch.equal(tensor, resumed["moments"][name]) for name, tensor in through["moments"].items())


def test_a_checkpoint_of_one_learner_is_one_of_the_other(two, first_step):
    expected, _, _ = alone(Job(owners=(0,) * 4, steps=(0.05, 0.02), start=first_step))
    found = two[0]["going on"]
    assert_close(found["weights"], expected)
    back = Job(owners=(0,) * 4, steps=(0.1,), start={name: found[name] for name in ("weights", "moments")})
    assert alone(back)[2]["steps"].item() == 4


# ------------------------------------------------------------------------------------------------- a worker of its own
def test_a_single_worker_makes_the_same_steps(solo):
    job = Job(owners=(0,) * 4)
    weights, steps, moments = alone(job)
    worker = Worker(job, 0, solo)
    found = take_steps(worker.learner, worker.model, job, 0, range(3))
    assert_close(worker.view.state_dict(), weights)
    assert_close(worker.learner.export_state(), moments)
    assert [step.norm for step in found] == pytest.approx([step.norm for step in steps], rel=1e-5)


def test_weights_are_adopted_from_the_view_frozen_ones_too_and_trained_ones_are_published_to_it(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    other = net(seed=5)
    worker.view.load_state_dict(other.state_dict())
    worker.learner.adopt()
    tokens = torch.arange(5).reshape(1, 5)
    torch.testing.assert_close(worker.model(tokens), other(tokens))
    for parameter in worker.view.parameters():
        parameter.data.zero_()
    worker.learner.publish()
    trained = {name for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert len(trained) < len(list(other.parameters()))
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


def test_a_gradient_of_zero_makes_no_step(solo):
    job = Job(owners=(0,) * 4, scale=0.0)
    worker = Worker(job, 0, solo)
    (step,) = take_steps(worker.learner, worker.model, job, 0, range(1))
    assert step.weight > 0
    assert step.norm is None
    assert worker.learner.export_state()["steps"].item() == 0


def test_an_empty_minibatch_makes_no_step(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    step = worker.learner.step({2: torch.arange(0)}, lambda rows: [])
    assert step == Step({"loss": 0.0, "rows": 0.0}, 0.0)


def test_moments_of_other_parameters_are_refused(solo):
    worker = Worker(Job(owners=(0,) * 4), 0, solo)
    wrong = {"steps": torch.tensor([1]), "mean": torch.zeros(3), "square": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="another policy or algorithm"):
        worker.learner.import_state(wrong)


def test_threads_of_one_process_cannot_shard():
    with pytest.raises(ConfigError, match=r"the 2 workers of the actor are threads.*cluster.session=ray"):
        Worker(Job(owners=(0, 0, 1, 1)), 0, ThreadGroup.make(2)[0])
