"""Measures the stages of a training job in real workers, prints what they cost, and writes the profile.

python experiments/profile_stages.py env=maniskill_pick policy=tiny_vla run.dir=runs/profile
python experiments/profile_stages.py workflow=reasoning algorithm=ppo run.dir=runs/profile_math

The keys are those of train_vla.py, or with workflow=reasoning those of train_llm_math.py.  The profile goes to
<run.dir>/profile.json and to the cache, where plan=auto finds it as long as hardware, library versions and the sections
that the stages' times depend on stay as they are.  It is measured anew each time.
"""

import sys
from pathlib import Path

from rlinf_embodied.command_line import math_main, train_main
from rlinf_embodied.config import MathConfig, TrainConfig

REASONING = "workflow=reasoning"


def profile(config: TrainConfig | MathConfig) -> None:
    # these import torch: only once the input is known to be right
    from rlinf_embodied.embodied.job import EmbodiedJob
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.runtime.discovery import find_cluster
    from rlinf_embodied.runtime.sessions import open_session
    from rlinf_embodied.telemetry.live import LiveView
    from rlinf_embodied.telemetry.run_folder import RunFolder
    from rlinf_embodied.telemetry.tables import text_table
    from rlinf_embodied.training.planning import measured_profile

    job = ReasoningJob(config) if isinstance(config, MathConfig) else EmbodiedJob(config)
    job.require_checkpoint(None)
    cluster = find_cluster(config.cluster)
    folder = RunFolder(Path(config.run.dir or f"runs/profile-{job.name}"))
    with open_session(config.cluster) as session, LiveView(1, f"{job.name} · profile") as view:
        start = job.starting_policy(session, cluster, view.progress, folder.path)
        session.clear()
        workflow = job.workflow(str(start))
        found, path = measured_profile(job, cluster, workflow, session, view.progress, folder.path)
        folder.write_text("profile.json", path.read_text(encoding="utf-8"))
        view.note(text_table(found.rows(), f"{found.name} on {cluster.description}, seconds and MB:"))
        view.note(f"{folder.path / 'profile.json'}, kept as {path}")


if __name__ == "__main__":
    if REASONING in sys.argv:
        sys.argv.remove(REASONING)
        math_main(profile)
    train_main(profile)
