"""Workers are as small as their stages allow: none brings torch or a simulator."""

from __future__ import annotations

import pytest

from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.runtime.host import Call, Receipt, StageContext, StepContext, WorkerSpec
from rlinf_embodied.workflow.graph import StageSpec

HEAVY = {"torch", "sapien", "mani_skill", "gymnasium", "transformers", "matplotlib"}
MOST_MB = 160  # measured: see docs; 64 of them and Ray fit into 16 GiB


@pytest.mark.ray
def test_a_worker_without_torch_stays_small(new_ray_session):
    new_ray_session.start([WorkerSpec(0, "emulated")])
    context = StageContext(0, "emulated", (0,), ((0,),), 1, (0,), SoloGroup(), {})
    new_ray_session.add_stage(StageSpec("looker", "light_fakes.Looker", None), [context])
    ((result, receipt),) = new_ray_session.submit([(0, Call("looker", "run", StepContext(0), (0,)), [])])
    found, answer = new_ray_session.fetch([result, receipt], "looker")
    assert found == {"seen": []}
    assert isinstance(answer, Receipt)
    modules, kilobytes = answer.report
    assert "numpy" in modules
    assert {name.split(".")[0] for name in modules} & HEAVY == set()
    assert kilobytes / 1024 < MOST_MB
