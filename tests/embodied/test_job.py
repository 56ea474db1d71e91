"""What a job refuses before it starts."""

from __future__ import annotations

import pytest
from runs import tiny

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.embodied import job
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import ConfigError


@pytest.mark.parametrize(("coef", "refused"), [(0.01, True), (0.0, False)])
def test_an_entropy_bonus_is_refused_where_a_policy_has_none(coef: float, refused: bool) -> None:
    run = EmbodiedJob(tiny("policy=flow_vla", f"algorithm.entropy_coef={coef}", "warm_start.from_scratch=true"))
    if not refused:
        run.require_checkpoint(None)
        return
    with pytest.raises(ConfigError, match=r"algorithm.entropy_coef is 0.01, but policies.flow_vla.FlowVLA has none"):
        run.require_checkpoint(None)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (["env.carry_over=true"], True),
        (["env.carry_over=true", "env.options.backend=batched"], False),
        (["env.carry_over=false"], False),
    ],
)
def test_what_a_gpu_could_not_restore_is_not_carried_over(monkeypatch, given: list[str], refused: bool) -> None:
    gpus = Cluster("local", "cuda", num_devices=1, num_cores=2, memory_bytes=1 << 30)
    monkeypatch.setattr(job, "find_cluster", lambda config: gpus)
    start = ["env=maniskill_pick", "warm_start.from_scratch=true"]
    run = EmbodiedJob(tiny(*start, *given))
    if not refused:
        run.require_checkpoint(None)
        return
    with pytest.raises(ConfigError, match=r"env.carry_over is True.*carry_over=false, or env.options.backend=batched"):
        run.require_checkpoint(None)
