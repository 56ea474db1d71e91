"""Training continues from a checkpoint or a snapshot as if nothing had happened in between."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.learner import AdamSettings, Learner
from rlinf_embodied.learning.learner_stage import LearnerStage, StagePart
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.weights import SharedPolicy
from rlinf_embodied.runtime.host import Call, StepContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.tensor_wire import copied


class Trained(LearnerStage):
    """A stage with a policy, another network, and an optimizer of both."""

    def __init__(self, with_critic: bool = True) -> None:
        torch.manual_seed(0)
        self.policy, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)
        parameters = [*self.policy.parameters(), *(self.critic.parameters() if with_critic else ())]
        settings = AdamSettings(0.1, (0.9, 0.999), 1e9)
        self.learner = Learner(parameters, settings, ("loss",), Reducer(SoloGroup(), (0,)))
        modules = {"critic": self.critic} if with_critic else {}
        self.hold(
            SharedPolicy(SimpleNamespace(module=self.policy)), SoloGroup(), "cpu", {"optimizer": self.learner}, modules
        )

    def write_policy(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    def step(self, seed: int) -> None:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

        def run() -> LossSums:
            loss = (self.policy(rows) - self.critic(rows)).square().sum() + self.policy(rows).square().sum()
            return LossSums(loss, loss.new_tensor(4.0), loss.detach()[None])

        self.learner.step({0: torch.arange(4)}, lambda rows: [Pass(4.0, run)])
        self.shared.version += 1

    @property
    def weights(self) -> list[float]:
        parts = [*self.policy.parameters(), *self.critic.parameters()]
        return torch.cat([part.detach().reshape(-1) for part in parts]).tolist()


def after(made: Trained, *steps: int) -> Trained:
    for step in steps:
        made.step(step)
    return made


def at(iteration: int) -> SimpleNamespace:
    return SimpleNamespace(iteration=iteration)


def written(made: Trained, root: Path) -> str:
    made.save(at(2), (str(root), 2, 1, StagePart(state={"blocks": []})))
    return str(root / "step_000002")


def test_a_checkpoint_brings_back_networks_moments_and_version(tmp_path) -> None:
    first = after(Trained(), 1, 2)
    folder = written(first, tmp_path)
    assert load_state(Path(folder)) == {"blocks": [], "version": 2}
    second = Trained()
    second.policy.load_state_dict(first.policy.state_dict())  # as whoever loads a policy does
    second.load(at(2), folder)
    assert second.shared.version == 2
    assert after(second, 3).weights == after(first, 3).weights


@pytest.mark.parametrize("alone", [True, False])
def test_a_worker_copies_what_it_publishes_only_if_it_stays_in_its_process(alone) -> None:
    host = WorkerHost(WorkerSpec(0, "cpu"), alone=alone)
    host.stages["actor"], host._exclusive["actor"] = made, _ = after(Trained(), 1), frozenset()
    publish = lambda method: host.invoke(Call("actor", method, StepContext(1), publishes=True), [])[0]  # noqa: E731
    message, part = publish("export_weights"), publish("export_snapshot")
    moments = made.learner._optimizer._mean
    for sent, kept in (
        (message.tensors["weight"], made.policy.weight),
        (part.weights.tensors["weight"], made.policy.weight),
        (part.tensors["critic"]["weight"], made.critic.weight),
        (part.tensors["optimizer"]["mean"], moments),
    ):
        assert torch.equal(sent, kept)
        assert (sent.data_ptr() == kept.data_ptr()) == alone
    host.clear()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_snapshot_is_in_shares_from_which_every_worker_continues(size: int) -> None:
    workers = [after(Trained(), 1, 2) for _ in range(size)]
    for rank, worker in enumerate(workers):
        worker.group = worker.learner.reducer.group = SimpleNamespace(rank=rank, size=size)
    parts = [copied(worker.export_snapshot(at(2))) for worker in workers]
    held = [(len(part.weights.tensors), len(part.tensors["optimizer"]["mean"])) for part in parts]
    assert held == {1: [(2, 8)], 2: [(1, 4), (1, 4)], 3: [(1, 3), (0, 3), (1, 2)]}[size]
    first = Trained()
    later = after(first, 1, 2, 3).weights
    for made in (first, Trained()):
        made.import_snapshot(at(2), parts)
        assert made.shared.version == 2
        assert after(made, 3).weights == later


def test_a_checkpoint_of_other_networks_is_refused(tmp_path) -> None:
    folder = written(after(Trained(), 1), tmp_path)
    other = Trained(with_critic=False)
    with pytest.raises(CheckpointError, match="the optimizer state has"):
        other.load(at(1), folder)
    assert other.shared.version == 0
