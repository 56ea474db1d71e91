"""The start-up's phases add up to the time until the first env step."""

import time

import pytest

from rlinf_embodied.telemetry.trace import Span, StartupClock


def step(name: str, start_s: float) -> Span:
    return Span(name, name.split(".")[0], 0, "cpu", start_s, start_s + 1.0)


def test_phases_add_up_to_the_time_until_the_first_step():
    clock = StartupClock(time.time() - 5.0, "env.step")
    clock.mark("imports")
    clock.mark("ray")
    later = time.time() + 2.0
    assert clock.first([step("policy.step", later - 1.0), step("eval_env.step", later + 1.0), step("env.step", later)])
    assert list(clock.phases) == ["imports", "ray", "before work"]
    assert clock.phases["imports"] == pytest.approx(5.0, abs=0.1)
    assert clock.phases["before work"] == pytest.approx(2.0, abs=0.1)
    assert clock.total_s == pytest.approx(sum(clock.phases.values()))
    assert str(clock).startswith("first env.step after 7.0 s: imports 5.0, ray 0.0")


def test_the_start_up_ends_once():
    clock = StartupClock(time.time(), "env.step")
    assert not clock.first([step("policy.step", time.time())])  # no env has stepped
    assert clock.first([step("env.step", time.time())])
    total = clock.total_s
    clock.mark("later")
    assert not clock.first([step("env.step", time.time() + 9.0)])
    assert clock.total_s == total
    assert "later" not in clock.phases
