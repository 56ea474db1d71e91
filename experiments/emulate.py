"""Runs plans on a described cluster with stages that sleep: predicted and measured seconds, EMULATED.

python experiments/emulate.py profile=maniskill_openvla cluster=h100x8 plan=all
python experiments/emulate.py profile=grpo_llm cluster=h100x8 plan=runs/plan/plan.json time_scale=0.05
python experiments/emulate.py profile=maniskill_openvla cluster=h100x64 probes=true

With probes=true the emulated devices are profiled first, as a launch with plan=auto does, and the plan is made with
that profile: the probes and their seconds are printed.

Executor, Ray workers, messages and locks are the real ones; how the sleeps are timed: tools/emulated_stage.py.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rlinf_embodied.command_line import main
from rlinf_embodied.config import EmulationConfig
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.tables import described_table, text_table
from rlinf_embodied.tools.plans import find_cluster, find_named_plans, find_profile

if TYPE_CHECKING:
    from rlinf_embodied.tools.emulation import Emulated


def launched(config: EmulationConfig, pricer: Pricer, session: Session) -> list[Plan]:
    """Returns the plans that a launch makes from what its probes measure, and prints what that took."""
    from rlinf_embodied.tools.emulation import emulated_launch

    measured, probe_s = emulated_launch(pricer, session)
    rows = [{"probe": name, "EMULATED s": f"{seconds:.1f}"} for name, seconds in probe_s.items()]
    print(text_table(rows, f"EMULATED probes of a launch on {pricer.cluster.name}:"))
    start, planner = time.perf_counter(), Pricer(pricer.workflow, measured, pricer.cluster)
    plans = find_named_plans(config.plan, planner, config.num_ranked, config.max_staleness)
    profile_s, plan_s = sum(probe_s.values()), time.perf_counter() - start
    print(f"EMULATED training starts after {profile_s:.1f} s of probes and {plan_s:.1f} s of planning")
    for plan in plans:
        print(f"{plan.name}: {simulate(plan, planner).iteration_s:.2f} s by what the probes measured")
    return plans


def emulate(config: EmulationConfig) -> list[Emulated]:
    """Runs the plans, prints them as a table, and returns what each took."""
    profile, cluster = find_profile(config), replace(find_cluster(config.cluster), emulated=True)
    pricer = Pricer(workflow_for(profile), profile, cluster)
    plans = [] if config.probes else find_named_plans(config.plan, pricer, config.num_ranked, config.max_staleness)

    from rlinf_embodied.runtime.ray_session import RaySession
    from rlinf_embodied.tools.emulation import emulate as run_emulated

    session, done = RaySession(), []
    try:
        plans = launched(config, pricer, session) if config.probes else plans
        for plan in plans:
            print(f"EMULATED {plan.name}: predicted {simulate(plan, pricer).iteration_s:.2f} s ...", flush=True)
            done.append(run_emulated(pricer, session, plan, config.run.num_iterations, config.time_scale))
    finally:
        session.close()
    title = f"EMULATED {pricer.workflow.name} on {cluster.name} ({cluster.description}), profile {profile.name}"
    print(described_table([row(result) for result in done], ("plan", "devices"), title))
    print("seconds per iteration of the emulated cluster; late: this machine's own part")
    return done


def row(result: Emulated) -> dict[str, str]:
    low, high, median_s = min(result.measured_s), max(result.measured_s), statistics.median(result.measured_s)
    # by how much the wall clock was behind the deadlines at worst: the machine's own part of the measurement
    late_s = max(measured - due for measured, due in zip(result.measured_s, result.due_s, strict=True))
    return {
        "plan": result.plan.name,
        "devices": to_text(result.plan),
        "predicted s": f"{result.predicted_s:.2f}",
        "EMULATED s": f"{median_s:.2f} ({low:.2f}-{high:.2f})",
        "error": f"{result.predicted_s / median_s - 1.0:+.1%}",
        "memory": f"{result.peak_bytes / 1e9:.1f} GB",
        "late": f"{late_s / median_s:.1%}",
        "scale": f"{result.scale:.3g}",
    }


if __name__ == "__main__":
    main(emulate, EmulationConfig)
