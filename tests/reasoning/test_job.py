"""What a run says about itself before it starts."""

from __future__ import annotations

import pytest
from math_runs import tiny_math

from rlinf_embodied.reasoning.job import ReasoningJob


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ([], "1 for a right answer, 0 for another"),
        (["reward._target_=my_rewards.short_and_right"], "what my_rewards.short_and_right returns"),
        (["reward.format_reward=0.25"], "1 for a right answer, 0 for another, 0.25 for the right format"),
        (
            ["reward.overlong_tokens=4", "reward.overlong_penalty=0.5"],
            "1 for a right answer, 0 for another, up to -0.5 for length",
        ),
        (["reward.overlong_penalty=0.5"], "1 for a right answer, 0 for another"),
        (
            ["reward._target_=my_rewards.f", "reward.format_reward=2", "reward.overlong_tokens=4"],
            "what my_rewards.f returns, 2 for the right format, up to -1 for length",
        ),
    ],
    ids=["right", "own", "form", "length", "length that is off", "all"],
)
def test_what_is_rewarded_is_said(chosen: list[str], said: str) -> None:
    assert ReasoningJob(tiny_math(*chosen)).launch_notes() == [f"reward   {said} (reward.*)"]
