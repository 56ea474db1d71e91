"""Runs plans on a described cluster with stages that sleep: predicted and measured seconds, EMULATED.

python experiments/emulate.py profile=maniskill_openvla cluster=h100x8 plan=all
python experiments/emulate.py profile=grpo_llm cluster=h100x8 plan=runs/plan/plan.json time_scale=0.05 out=emulated.json
python experiments/emulate.py profile=maniskill_openvla cluster=h100x64 probes=true

With probes=true the emulated devices are profiled first, as a launch with plan=auto does, and the plan is made with
that profile: the probes and their seconds are printed.

Executor, Ray workers, messages and locks are the real ones; how the sleeps are timed: tools/emulated_stage.py.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.config import EmulationConfig
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.tables import described_table, text_table
from rlinf_embodied.tools.plans import find_cluster, find_named_plans, find_profile


def launched(config: EmulationConfig, pricer: Pricer, session: Session) -> tuple[list[Plan], dict[str, object]]:
    """Returns the plans that a launch makes from what its probes measure, and what that took."""
    from rlinf_embodied.tools.emulated_profile import EmulatedLaunch
    from rlinf_embodied.tools.emulation import Emulator

    probing = EmulatedLaunch(pricer, session)
    measured = probing.run()
    start = time.perf_counter()
    planner = Pricer(pricer.workflow, measured, pricer.cluster)
    plans = find_named_plans(config.plan, planner, config.num_ranked, config.max_staleness)
    plan_s, profile_s = time.perf_counter() - start, sum(float(row["EMULATED s"]) for row in probing.rows)
    rows = [{name: str(value) for name, value in row.items()} for row in probing.rows]
    print(text_table(rows, f"EMULATED probes of a launch on {pricer.cluster.name}:"))
    print(f"EMULATED training starts after {profile_s:.1f} s of probes and {plan_s:.1f} s of planning")
    predicted = {plan.name: Emulator(planner, session).predicted_s(plan) for plan in plans}
    print(*(f"{name}: {seconds:.2f} s by what the probes measured" for name, seconds in predicted.items()), sep="\n")
    launch = {"probes": probing.rows, "profile_s": profile_s, "plan_s": plan_s}
    launch["predicted_s"] = predicted
    return plans, {**launch, "profile": measured.to_dict()}


def emulate(config: EmulationConfig) -> None:
    profile, cluster = find_profile(config), replace(find_cluster(config.cluster), emulated=True)
    pricer = Pricer(workflow_for(profile, config.workflow), profile, cluster)
    plans = [] if config.probes else find_named_plans(config.plan, pricer, config.num_ranked, config.max_staleness)

    from rlinf_embodied.runtime.ray_session import RaySession
    from rlinf_embodied.tools.emulation import Emulator, row

    session = RaySession()
    launch: dict[str, object] = {}
    try:
        emulator = Emulator(pricer, session)
        if config.probes:
            plans, launch = launched(config, pricer, session)
        done = []
        for plan in plans:
            print(f"EMULATED {plan.name}: predicted {emulator.predicted_s(plan):.2f} s ...", flush=True)
            done.append(emulator.run(plan, config.run.num_iterations, config.time_scale))
    finally:
        session.close()
    rows = [row(result) for result in done]
    title = f"EMULATED {pricer.workflow.name} on {cluster.name} ({cluster.description}), profile {profile.name}"
    print(described_table(rows, ("plan", "devices"), title))
    print("seconds per iteration of the emulated cluster; late: this machine's own part")
    if config.out:
        body = {"emulated": True, "profile": profile.name, "cluster": cluster.name, "rows": rows}
        body |= {"launch": launch} if launch else {}
        body["plans"] = [result.to_dict() for result in done]
        Path(config.out).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(emulate, EmulationConfig)
