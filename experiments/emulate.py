"""Runs plans on a cluster that is only described, with stages that sleep: predicted against measured, EMULATED.

python experiments/emulate.py profile=maniskill_openvla cluster=h100x8 plan=all
python experiments/emulate.py profile=grpo_llm cluster=h100x8 plan=runs/plan/plan.json time_scale=0.05 out=emulated.json

Executor, Ray workers, messages and locks are the real ones; how the sleeps are timed: execution/emulated_stage.py.
"""

import json
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.config import EmulationConfig
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import workflow_for
from rlinf_embodied.planning_inputs import find_cluster, find_named_plans, find_profile
from rlinf_embodied.telemetry.tables import described_table, terminal_width


def emulate(config: EmulationConfig) -> None:
    profile, cluster = find_profile(config), replace(find_cluster(config.cluster), emulated=True)
    pricer = Pricer(workflow_for(profile, config.workflow), profile, cluster)
    plans = find_named_plans(config.plan, pricer, config.num_ranked, config.max_staleness)

    from rlinf_embodied.execution.emulation import Emulator, row
    from rlinf_embodied.runtime.ray_session import RaySession

    session = RaySession()
    try:
        emulator = Emulator(pricer, session)
        done = []
        for plan in plans:
            print(f"EMULATED {plan.name}: predicted {emulator.predicted_s(plan):.2f} s ...", flush=True)
            done.append(emulator.run(plan, config.run.num_iterations, config.time_scale))
    finally:
        session.close()
    rows = [row(result) for result in done]
    title = f"EMULATED {pricer.workflow.name} on {cluster.name} ({cluster.description}), profile {profile.name}"
    print(described_table(rows, ("plan", "devices"), title, terminal_width()))
    print("seconds per iteration of the emulated cluster; late: this machine's own part")
    if config.out:
        body = {"emulated": True, "profile": profile.name, "cluster": cluster.name, "rows": rows}
        body["plans"] = [result.to_dict() for result in done]
        Path(config.out).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(emulate, EmulationConfig)
