"""What a worker calls others by, on Ray: their actors' handles, which come with the call that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlinf_embodied.errors import LostWorkerError, PeerError, RlinfError
from rlinf_embodied.runtime import tensor_wire
from rlinf_embodied.runtime.call_wire import to_wire
from rlinf_embodied.runtime.heartbeat import Activity
from rlinf_embodied.runtime.host import Call, Receipt
from rlinf_embodied.runtime.relay import Ref

_TICK_S = 1.0  # between two looks whether the answer is wanted still


class RayPeers:
    """See relay.Peers."""

    def __init__(self, actors: Mapping[int, ActorHandle], attempt: int, activity: Activity) -> None:
        """Takes the handles of all workers that it may call, and what notes for whom this one waits."""
        self._actors, self._attempt, self._activity = actors, attempt, activity
        self._methods: dict[tuple[int, int], Callable[..., list[ray.ObjectRef]]] = {}

    def ask(self, worker: int, call: Call, payloads: Sequence[object]) -> list[Ref]:
        key = (worker, call.num_results + 1)
        if key not in self._methods:
            self._methods[key] = self._actors[worker].invoke.options(num_returns=key[1]).remote
        packed = [tensor_wire.pack(payload) for payload in payloads]
        return list(self._methods[key](to_wire(call, self._attempt), None, *packed))

    def take(self, refs: Sequence[Ref], workers: Sequence[int]) -> list[object]:
        given = cast("list[ray.ObjectRef]", list(refs))
        with self._activity.awaiting(workers):
            while given and ray.wait(given, num_returns=len(given), timeout=_TICK_S)[1]:
                self._activity.require_current(self._attempt)
            try:
                values = ray.get(given)
            except RayError as error:
                raise _ours(error, workers) from None
        return [value if isinstance(value, Receipt) else tensor_wire.unpack(value) for value in values]


def _ours(error: BaseException, workers: Sequence[int]) -> RlinfError:
    while isinstance(error, RayTaskError):
        error = cast(BaseException, error.cause)
    if isinstance(error, RlinfError):
        return error
    who = f"one of the workers {', '.join(map(str, workers))}, whose steps were waited for"
    told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, RayActorError) and len(workers) == 1:
        return LostWorkerError(f"worker {workers[0]}, whose steps were waited for, is lost ({told})", tuple(workers))
    return PeerError(f"{who}, is lost ({told})")
