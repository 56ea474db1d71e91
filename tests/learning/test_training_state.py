"""Training goes on from a checkpoint, or from a snapshot, as if nothing had happened in between."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.reduce import ExactReducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.learning.training_state import TrainingState


class Trained:
    """A policy, a network beside it, an optimizer of both, and their state."""

    def __init__(self, rank: int = 0, kind: type[ReplicatedLearner] = ReplicatedLearner) -> None:
        torch.manual_seed(0)
        self.policy, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)
        self.shared = SharedPolicy(SimpleNamespace(module=self.policy))
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        settings = AdamSettings(0.1, (0.9, 0.999), 1e9)
        self.learner = kind(parameters, settings, ("loss",), ExactReducer(SoloGroup(), (0,)))
        self.state = TrainingState(self.shared, rank, {"optimizer": self.learner}, {"critic": self.critic})

    def step(self, seed: int) -> None:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

        def run() -> LossSums:
            loss = (self.policy(rows) - self.critic(rows)).square().sum() + self.policy(rows).square().sum()
            return LossSums(loss, loss.new_tensor(4.0), loss.detach()[None])

        self.learner.step({0: torch.arange(4)}, lambda block, index: [Pass(4.0, run)])
        self.shared.version += 1

    @property
    def weights(self) -> list[float]:
        parts = [*self.policy.parameters(), *self.critic.parameters()]
        return torch.cat([part.detach().reshape(-1) for part in parts]).tolist()


def after(made: Trained, *steps: int) -> Trained:
    for step in steps:
        made.step(step)
    return made


def written(made: Trained, root: Path) -> Path:
    def write_policy(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    made.state.write((str(root), 2, 1), write_policy, made.state.export(), {"blocks": []})
    made.state.wait()
    return root / "step_000002"


def test_a_checkpoint_brings_back_networks_moments_and_version(tmp_path) -> None:
    first = after(Trained(), 1, 2)
    folder = written(first, tmp_path)
    second = Trained()
    second.policy.load_state_dict(first.policy.state_dict())  # as whoever loads a policy does
    second.state.load(str(folder), 2)
    assert second.shared.version == 2
    assert after(second, 3).weights == after(first, 3).weights


def test_a_snapshot_is_a_copy_that_every_worker_goes_on_from() -> None:
    first = after(Trained(), 1, 2)
    parts = [first.state.snapshot(), Trained(rank=1).state.snapshot()]
    assert parts[1] is None
    later = after(first, 3).weights
    for made in (first, Trained()):
        made.state.go_on_from(parts)
        assert made.shared.version == 2
        assert after(made, 3).weights == later


class Half(ReplicatedLearner):
    """Holds one of two slices, by its rank."""

    shares = 2
    rank = 0

    def export_part(self) -> dict[str, torch.Tensor]:
        state = self.export_state()
        return {"steps": state["steps"]} | {n: state[n].chunk(2)[self.rank] for n in ("mean", "square")}

    def joined(self, parts):
        return {"steps": parts[0]["steps"]} | {n: torch.cat([part[n] for part in parts]) for n in ("mean", "square")}


def test_where_workers_hold_slices_each_keeps_its_own_and_a_share_of_the_weights() -> None:
    workers = [Trained(rank, Half) for rank in range(2)]
    for rank, worker in enumerate(workers):
        after(worker, 1, 2)
        worker.learner.rank = rank
    parts = [worker.state.snapshot() for worker in workers]
    assert [sorted(part.weights.tensors) for part in parts] == [["weight"], ["bias"]]
    assert [len(part.groups["optimizer"]["mean"]) for part in parts] == [4, 4]
    later = after(workers[0], 3).weights
    made = Trained(0, Half)
    made.state.go_on_from(parts)
    assert made.shared.version == 2
    assert after(made, 3).weights == later


def test_a_checkpoint_of_other_networks_is_refused(tmp_path) -> None:
    folder = written(after(Trained(), 1), tmp_path)
    other = Trained()
    parameters = list(other.policy.parameters())
    learner = ReplicatedLearner(parameters, AdamSettings(0.1, (0.9, 0.999), 1e9), (), other.learner.reducer)
    state = TrainingState(other.shared, 0, {"optimizer": learner})
    with pytest.raises(CheckpointError, match="the optimizer state has"):
        state.load(str(folder), 1)
    assert other.shared.version == 0
