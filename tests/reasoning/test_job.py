"""What a run says about itself before it starts."""

from __future__ import annotations

import pytest
from math_runs import PPO, tiny_math

from rlinf_embodied.reasoning.job import ReasoningJob

OVERLONG = ["reward.overlong_tokens=4", "reward.overlong_penalty=0.5"]
FORM = ["reward.format_reward=0.25"]


@pytest.mark.parametrize(
    ("chosen", "said", "drops"),
    [
        (["reward.overlong_penalty=0.5"], "1 for a right answer, 0 for another", False),
        (FORM, "1 for a right answer, 0 for another, 0.25 for the right format", True),
        ([*FORM, *PPO], "1 for a right answer, 0 for another, 0.25 for the right format", False),
        ([*FORM, "algorithm=grpo"], "1 for a right answer, 0 for another, 0.25 for the right format", False),
        (["reward._target_=my.f", *OVERLONG], "what my.f returns, up to -0.5 for length", False),
    ],
)
def test_what_is_rewarded_and_dropped_is_said(chosen: list[str], said: str, drops: bool) -> None:
    reward, *others = ReasoningJob(tiny_math(*chosen)).launch_notes()
    assert reward == f"reward   {said} (reward.*)"
    assert len(others) == drops
    assert all("groups that differ only in their format leave the batch" in note for note in others)
