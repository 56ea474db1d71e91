"""What the update of a VLA keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from runs import clone, executor_for, exported_weights, iterate, tiny, trees

from policies.tiny_vla import TinyVLA
from rlinf_embodied.algorithms.on_policy import OnPolicy
from rlinf_embodied.embodied.workflow import run_iteration
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.interfaces.policies import Evaluation
from rlinf_embodied.runtime.session import SerialSession


def started(monkeypatch, coefficient: float, change: Callable[[Evaluation], Evaluation]) -> Executor:
    evaluate = TinyVLA.evaluate
    monkeypatch.setattr(TinyVLA, "evaluate", lambda *args, **named: change(evaluate(*args, **named)))
    short = ["env.num_envs=8", "algorithm.epochs=1", "algorithm.critic_warmup_iterations=0"]
    config = tiny(f"algorithm.entropy_coef={coefficient}", *short)
    return executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(tiny()))


@pytest.mark.parametrize(("coefficient", "kept"), [(0.0, False), (0.01, True)])
def test_the_entropys_graph_is_there_only_where_it_is_pulled_at(coefficient, kept, monkeypatch) -> None:
    seen = set()

    def looked(found: Evaluation) -> Evaluation:
        if torch.is_grad_enabled() and found.entropy is not None:
            seen.add((found.log_probs.requires_grad, found.entropy.requires_grad))
        return found

    (metrics,) = iterate(tiny(), started(monkeypatch, coefficient, looked), 1)
    assert seen == {(True, kept)}
    assert metrics["losses/entropy"] > 0


def test_an_entropy_bonus_without_an_entropy_is_refused(monkeypatch) -> None:
    executor = started(monkeypatch, 0.01, lambda found: replace(found, entropy=None))
    with pytest.raises(Exception, match=r"algorithm.entropy_coef is 0.01, but .*has no entropy in closed form"):
        iterate(tiny(), executor, 1)


@pytest.mark.parametrize(("epochs", "calls"), [(1, 1), (4, 1)])
def test_what_a_critic_reads_of_the_policys_network_is_computed_once_for_all_its_epochs(
    epochs: int, calls: int, monkeypatch
) -> None:
    """A call of the network for each block_size samples, then the ratio's and the policy's own."""
    config = tiny("policy.critic=observation", f"algorithm.value_epochs={epochs}", "algorithm.epochs=1")
    executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
    rows, hidden, fit = [], TinyVLA._hidden, OnPolicy._fit_critic
    with monkeypatch.context() as patch:

        def fitted(self) -> dict[str, float]:
            patch.setattr(TinyVLA, "_hidden", lambda own, f: rows.append(len(f["proprio"])) or hidden(own, f))
            found = fit(self)
            patch.setattr(TinyVLA, "_hidden", hidden)
            return found

        patch.setattr(OnPolicy, "_fit_critic", fitted)
        (metrics,) = iterate(config, executor, 1)
    assert sum(rows) == calls * config.env.num_envs * config.env.chunks_per_rollout
    assert metrics["losses/value_loss"] > 0


@pytest.mark.parametrize(
    "given", ["policy.critic=privileged", "policy.critic=observation", "algorithm.one_optimizer=true"]
)
def test_the_rate_of_a_critic_decays_as_the_policys_does(given: str) -> None:
    config = tiny(given, "algorithm.lr_end_fraction=0", "run.num_iterations=2", "algorithm.critic_warmup_iterations=0")
    executor, weights = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config)), []
    for number in range(2):
        run_iteration(executor, number)
        weights.append(exported_weights(executor))
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())  # the last rate is 0
