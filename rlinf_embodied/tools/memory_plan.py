"""Where a large policy fits: learners and placements of rollout and actor, by the formulas of memory.py.

both resident    a device holds what rollout and actor need at any time; they run sequentially
switching        the one whose turn is over leaves the device (docs/planning.md, context switching)
apart            half of the devices are the actor's, the other half the rollout's
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlinf_embodied.tools import memory
from rlinf_embodied.tools.memory import Envelope, PolicyShape

GB = 1e9
_PLAIN, _CHECKPOINTED = "plain", "checkpointed"
_COLUMN = {False: _PLAIN, True: _CHECKPOINTED}


class Placement(StrEnum):
    """Where rollout and actor are."""

    resident = "both resident"
    switching = "switching"
    apart = "apart"


class LearnerKind(StrEnum):
    """Who holds what of the weights."""

    replicated = "replicated"
    sharded = "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one device holds under one arrangement, as a function of the rows of a training pass."""

    learner: LearnerKind
    num_devices: int
    placement: Placement
    checkpointing: bool
    actor: Envelope  # of a device that trains, rollouts included where they are on it
    rollout: float  # of a device that only makes rollouts; 0 without such a device

    def needed(self, rows: int) -> float:
        """The bytes of the fullest device."""
        return max(self.actor.at(rows), self.rollout)

    def most_rows(self, room: float) -> int:
        """The largest training pass that fits; 0 if none does."""
        return self.actor.most_rows(room) if self.rollout <= room else 0


def fits(policy: PolicyShape, num_devices: Sequence[int], rollout_rows: int) -> list[Fit]:
    """Returns all arrangements; replicated ones of several devices once, as each device holds the same."""
    work = policy.rollout.at(rollout_rows)
    found = []
    for learner, number in _learners(num_devices):
        for checkpointing in (False, True):
            found += [
                _fit(policy, learner, number, placement, checkpointing, work)
                for placement in Placement
                if placement is not Placement.apart or number >= 2
            ]
    return found


def _learners(num_devices: Sequence[int]) -> Iterator[tuple[LearnerKind, int]]:
    yield LearnerKind.replicated, max(num_devices)
    yield from ((LearnerKind.sharded, number) for number in num_devices)


def _fit(
    policy: PolicyShape, learner: LearnerKind, number: int, placement: Placement, checkpointing: bool, rollout: float
) -> Fit:
    training = number // 2 if placement is Placement.apart else number
    if learner is LearnerKind.replicated:
        own, view = memory.weights(policy) + memory.masters(policy) + memory.moments(policy), 0.0
        work = memory.replicated_work(policy, checkpointing)
    else:
        own = memory.slices(policy, training) + memory.moment_slices(policy, training)
        view = memory.weights(policy)  # that rollouts read: learning/sharded.py
        work = memory.sharded_work(policy, training, checkpointing)
    alone = memory.weights(policy) + rollout
    actors = {
        Placement.resident: work.or_at_least(rollout).plus(own + view),
        Placement.switching: work.plus(own).or_at_least(alone),
        Placement.apart: work.plus(own),
    }
    return Fit(
        learner=learner,
        num_devices=number,
        placement=placement,
        checkpointing=checkpointing,
        actor=actors[placement],
        rollout=alone if placement is Placement.apart else 0.0,
    )


# ------------------------------------------------------------------------------------------------------------- tables
def term_rows(policies: dict[str, PolicyShape]) -> list[dict[str, str]]:
    """Returns a table of the terms: a row per term, a column per policy."""
    by_policy = {name: _terms(policy) for name, policy in policies.items()}
    names = next(iter(by_policy.values()))
    return [{"term": term} | {name: terms[term] for name, terms in by_policy.items()} for term in names]


def _terms(policy: PolicyShape) -> dict[str, str]:
    width = policy.value_bytes
    cache = memory.key_values(policy.cache, policy.rollout_tokens, width)
    per_row = {
        "activations of a pass": policy.plain.with_gradients.per_row,
        "the same, checkpointed": policy.checkpointed.with_gradients.per_row,
        f"key-value cache of a rollout ({policy.rollout_tokens} tokens)": cache,
        "a rollout's call in all, its cache included": policy.rollout.per_row,
        "logits of a rollout": memory.logits(1, policy.logits_columns, width),
        f"logits of a pass ({policy.training_positions} positions)": memory.logits(
            policy.training_positions, policy.logits_columns, width
        ),
    }
    whole = {
        "weights": memory.weights(policy),
        "master weights": memory.masters(policy),
        "gradient": memory.gradient(policy),
        "Adam's moments": memory.moments(policy),
    }
    counts = {"parameters": policy.num_parameters, "of them trained": policy.num_trained}
    return (
        {name: f"{count:,}" for name, count in counts.items()}
        | {f"{name}, GB": f"{size / GB:.2f}" for name, size in whole.items()}
        | {f"{name}, MB a row": f"{size / 1e6:.2f}" for name, size in per_row.items()}
    )


def fit_rows(method: str, found: Sequence[Fit], rows: int, room: float) -> list[dict[str, str]]:
    """Returns a table of arrangements: bytes with `rows` rows, what is left or missing, the largest pass that fits."""
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for fit in found:
        devices = f"up to {fit.num_devices}" if fit.learner is LearnerKind.replicated else str(fit.num_devices)
        key = (method, fit.learner.value, devices, fit.placement.value)
        line = table.setdefault(key, dict(zip(("method", "learner", "devices", "placement"), key, strict=True)))
        name = _COLUMN[fit.checkpointing]
        needed = fit.needed(rows)
        left = (room - needed) / GB
        line[f"{name}, GB"] = f"{needed / GB:.1f}"
        line[f"{name}: left"] = f"{left:.1f}" if left >= 0 else f"lacks {-left:.1f}"
        line[f"{name}: most rows"] = str(fit.most_rows(room))
        if fit.rollout > room:
            line["placement"] = f"{fit.placement.value} (rollout does not fit)"
    return list(table.values())
