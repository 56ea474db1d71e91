"""What the benchmark of plans makes of spans."""

from experiments.bench import plans
from rlinf_embodied.telemetry.trace import Span


def test_what_the_busiest_worker_spends_in_no_stage_is_outside():
    measured = plans.Measured()
    spans = [Span("env.step", "env", 0, "cpu", 0.0, 2.0), Span("policy.step", "policy", 0, "cpu", 2.0, 3.0)]
    spans += [Span("env.step", "env", 1, "cpu", 0.0, 1.0)]
    measured.add(4.0, spans, {"rollout/env_steps": 100.0})
    assert measured.to_json()["outside_stages"].median == 0.25  # worker 0 is busy for 3 of 4 s
    assert measured.stages_s == [{"time/env_s": 2.0, "time/policy_s": 1.0}]
