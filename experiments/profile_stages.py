"""Measures the stages of a training job in real workers, prints what they cost, and writes the profile.

python experiments/profile_stages.py env=maniskill_pick policy=tiny_vla run.dir=runs/profile
python experiments/profile_stages.py workflow=reasoning algorithm=ppo run.dir=runs/profile_math

The keys are those of train_vla.py, or with workflow=reasoning those of train_llm_math.py.  The profile goes to
<run.dir>/profile.json and to the cache, where plan=auto finds it as long as hardware, library versions and the sections
that the stages' times depend on stay as they are.  It is always measured again.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_math, compose_train, split
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.config.checks import require_one_of

if TYPE_CHECKING:
    from rlinf_embodied.planning.profile import Profile  # imports numpy, before which a process is pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Keys in addition to those of the training."""

    workflow: str = "embodied"  # or reasoning

    def __post_init__(self) -> None:
        require_one_of(self, "", "workflow", "embodied", "reasoning")


def compose_job(words: Sequence[str]) -> TrainConfig | MathConfig:
    own, overrides = split(Options, words)
    return (compose_math if own.workflow == "reasoning" else compose_train)(overrides)


def profile_stages(config: TrainConfig | MathConfig) -> "Profile":
    """Measures the stages, writes and prints the profile, and returns it."""
    from rlinf_embodied.embodied.job import EmbodiedJob  # these import torch, which must find the pins
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.runtime.session import find_cluster, make_session
    from rlinf_embodied.telemetry.live import LiveView
    from rlinf_embodied.telemetry.run_folder import RunFolder
    from rlinf_embodied.telemetry.tables import text_table
    from rlinf_embodied.training.planning import measured_profile

    job = ReasoningJob(config) if isinstance(config, MathConfig) else EmbodiedJob(config)
    job.require_checkpoint(None)
    cluster = find_cluster(config.cluster)
    folder = RunFolder(Path(config.run.dir or f"runs/profile-{job.name}"))
    view = LiveView(1)
    with closing(make_session(config.cluster)) as session:
        start = str(job.starting_policy(session, cluster, view.progress))
        session.clear()
        profile, path = measured_profile(job, cluster, start, session, view.progress)
        folder.write_text("profile.json", path.read_text(encoding="utf-8"))
        view.note(text_table(rows(profile), f"{profile.name} on {cluster.description}, seconds and MB:"))
        view.note(f"{folder.path / 'profile.json'}, kept as {path}")
    return profile


def rows(profile: "Profile") -> list[dict[str, str]]:
    """Returns a table to print: a row per stage and point of its grid."""
    return [
        {
            "stage": stage.name if (i, j) == (0, 0) else "",
            "items per device": f"{items:g}",
            "devices": f"{devices:g}",
            "s per": "chunk-step" if stage.in_loop else "call",
            "seconds": f"{stage.seconds[i, j]:.4g}",
            "resident MB": f"{stage.resident_bytes[i, j] / 1e6:.1f}",
            "working MB": f"{stage.working_bytes[i, j] / 1e6:.1f}",
        }
        for stage in profile.stages.values()
        for i, items in enumerate(stage.items_per_device)
        for j, devices in enumerate(stage.devices)
    ]


if __name__ == "__main__":
    main(profile_stages, TrainConfig, compose_job)
