"""How many rows a call of the policy has: a block's where equal bits are promised, otherwise all of a worker's."""

from __future__ import annotations

import pytest
import torch
from policy_calls import acted, rows_of_calls
from runs import clone, executor_for, iterate, tiny, trees

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.session import SerialSession


def test_the_rows_of_a_call_are_a_blocks_where_equal_bits_are_promised() -> None:
    assert rows_of_calls(tiny()) == [4] * 8
    assert rows_of_calls(tiny("env.rows_per_call=16")) == [4] * 8
    assert rows_of_calls(tiny("run.exact=off")) == [16, 16]
    assert rows_of_calls(tiny("run.exact=off", "env.rows_per_call=9")) == [8, 8, 8, 8]  # whole blocks
    with pytest.raises(ConfigError, match=r"env.rows_per_call is 0, but it must be at least 1: leave it out"):
        tiny("env.rows_per_call=0")


def test_every_block_has_the_actions_and_columns_of_its_own_rows() -> None:
    _, exact, ours = acted(tiny(), frozen=2)
    calls, actions, theirs = acted(tiny("run.exact=off"), frozen=2)
    assert calls == [12, 12]  # a block of frozen rows is left out
    assert actions.keys() == exact.keys()
    assert actions[2] is exact[2] is None
    for block in (0, 1, 3):
        assert torch.equal(actions[block], exact[block])
        assert torch.allclose(ours[block].log_probs, theirs[block].log_probs, atol=1e-5)
        for name, value in ours[block].features.items():
            assert torch.allclose(value.float(), theirs[block].features[name].float(), atol=1e-4)


def test_training_in_calls_of_all_rows_begins_at_a_ratio_of_one() -> None:
    config = tiny("run.exact=off")
    executor = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
    assert iterate(executor, 2)[-1]["losses/initial_log_ratio"] <= 1e-5
