"""What the update of a VLA keeps in memory."""

from __future__ import annotations

import pytest
import torch
from runs import clone, executor_for, iterate, tiny, trees

from policies.tiny_vla import TinyVLA
from rlinf_embodied.runtime.session import SerialSession


@pytest.mark.parametrize(("coefficient", "kept"), [(0.0, False), (0.01, True)])
def test_the_entropys_graph_is_there_only_where_it_is_pulled_at(coefficient, kept, monkeypatch) -> None:
    seen, evaluate = set(), TinyVLA.evaluate

    def looked(self, *arguments, **named):
        found = evaluate(self, *arguments, **named)
        if torch.is_grad_enabled():
            seen.add((found.log_probs.requires_grad, found.entropy.requires_grad))
        return found

    monkeypatch.setattr(TinyVLA, "evaluate", looked)
    config = tiny(f"algorithm.entropy_coef={coefficient}", "algorithm.critic_warmup_iterations=0")
    executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
    (metrics,) = iterate(executor, 1)
    assert seen == {(True, kept)}
    assert metrics["losses/entropy"] > 0
