"""Nested payloads cross the wire with their structure, types and bits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_embodied.interfaces.envs import Observation, RunningEpisode
from rlinf_embodied.learning.weights import WeightsMessage, export_weights, install_weights
from rlinf_embodied.runtime.host import Call, Receipt, StepContext, WorkerSpec, solo_context
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.runtime.tensor_wire import pack, unpack
from rlinf_embodied.workflow.graph import StageSpec
from tests.observations import observed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]
tensors = st.builds(
    lambda shape, dtype: (torch.arange(int(np.prod(shape)), dtype=torch.float32) - 3).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
plain = st.none() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
nested = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)


@given(nested)
@settings(max_examples=60)
def test_a_payload_comes_back_as_it_was(value: object) -> None:
    packed = pack(value)
    assert not holds_tensors(packed)
    assert same(unpack(packed), value)


def test_dataclasses_keep_their_type_and_what_is_no_tensor() -> None:
    observation = observed(torch.rand(2, 3), ("a", "b"), torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8))
    back = unpack(pack({"seen": observation, "episode": RunningEpisode(7, torch.rand(3, 2))}))
    assert isinstance(back, dict)
    assert isinstance(back["seen"], Observation)
    assert torch.equal(back["seen"].proprio, observation.proprio)
    assert (back["seen"].instruction, back["seen"].privileged) == (("a", "b"), None)
    assert back["episode"].seed == 7


@dataclass(frozen=True)
class Outer:
    inner: dict[str, list[torch.Tensor]]
    name: str


def test_what_was_received_can_be_written_to_and_is_a_copy() -> None:
    source = torch.zeros(3)
    packed = pack(Outer({"x": [source]}, "n"))
    packed.inner["x"][0].array.flags.writeable = False  # as it lies in Ray's shared store
    back = unpack(packed)
    assert isinstance(back, Outer)
    back.inner["x"][0].add_(1.0)
    assert float(source.sum()) == 0.0
    assert back.name == "n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_where_they_lie_and_installed_from_there(dtype: torch.dtype) -> None:
    source, target = (torch.nn.Linear(3, 2).to(dtype) for _ in range(2))
    packed = pack(export_weights(source, 4))
    assert isinstance(packed, WeightsMessage)
    arrays = {name: leaf.array for name, leaf in cast("dict[str, Any]", packed.tensors).items()}
    for array in arrays.values():
        array.flags.writeable = False  # as it lies in Ray's shared store
    with warnings.catch_warnings(action="error"):
        back = unpack(packed)
    assert isinstance(back, WeightsMessage)
    assert {name: tensor.data_ptr() for name, tensor in back.tensors.items()} == {
        name: array.ctypes.data for name, array in arrays.items()
    }
    install_weights(target, back)
    with torch.no_grad():
        target.weight.add_(1.0)  # what was installed is the module's own
    install_weights(target, back)
    assert all(torch.equal(mine, source.state_dict()[name]) for name, mine in target.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_and_tensors_with_a_gradient_travel_by_value(dtype: torch.dtype) -> None:
    base = torch.arange(12.0).reshape(3, 4).to(dtype).requires_grad_()
    for view in (base.t(), base[:, ::2], base[1, 2]):
        back = unpack(pack(view))
        assert isinstance(back, torch.Tensor)
        assert torch.equal(back, view)
        assert not back.requires_grad


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


def test_named_tuples_keep_their_type() -> None:
    back = unpack(pack([Pair(torch.ones(2), "r")]))
    assert isinstance(back, list)
    assert isinstance(back[0], Pair)
    assert (float(back[0].left.sum()), back[0].right) == (2.0, "r")


@pytest.mark.ray
def test_what_travels_as_numpy_is_read_where_it_lies_and_cannot_be_written(ray_session: Session) -> None:
    session = ray_session
    session.start([WorkerSpec(0, "cpu"), WorkerSpec(1, "cpu")])
    for worker in (0, 1):
        session.add_stage(StageSpec("arrays", "fakes.Arrays", None), [solo_context((0,), worker=worker)])
    run = lambda worker, payloads: session.submit(  # noqa: E731
        [(worker, Call("arrays", "run", StepContext(0), (0,), len(payloads)), payloads)]
    )[0]
    first, _ = run(0, [])
    _, receipt = run(1, [first])
    (told,) = of_type(session.fetch([receipt], "arrays"), Receipt)
    assert told.report == {"array": "ValueError", "tensor": "written", "array_owns_its_memory": False}
