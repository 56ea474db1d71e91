"""What experiments/profile_stages.py does: measures a job's stages, also with other sizes of blocks.

The last bits of a row depend on the size of its block, so that no planner may choose it: the config does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.explain import Ranked, rank
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import as_measured, linked
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.runtime.session import find_cluster, open_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.tables import text_table
from rlinf_embodied.training.planning import measured_profile

Config = TrainConfig | MathConfig


def with_block_size(config: Config, size: int) -> Config:
    """Returns a config whose blocks have this number of rows (env.block_size, generation.rows_per_block).

    Raises:
        ConfigError: the rest of the config does not allow it; says what it asks for.
    """
    if isinstance(config, TrainConfig):
        return replace(config, env=replace(config.env, block_size=size))
    return replace(config, generation=replace(config.generation, rows_per_block=size))


def sizes_in(texts: Sequence[str]) -> list[int]:
    """Returns the sizes in the values of `block_sizes`, such as ["8,16"]; [] otherwise.

    Raises:
        ConfigError: they are no positive numbers.
    """
    sizes = [size.strip() for text in texts for size in text.split(",")]
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ConfigError(f"block_sizes is {','.join(texts)!r}, but it is a list of rows: use block_sizes=8,16")
    return list(dict.fromkeys(map(int, sizes)))


def profile_stages(config: Config, sizes: Sequence[int] = ()) -> None:
    """Measures a job's stages, prints what they cost, and writes <run.dir>/profile.json.

    Args:
        config: of the job.
        sizes: of blocks, to be compared: each is measured, and goes to profile_<size>.json.

    Raises:
        ConfigError: the config does not allow one of the sizes; nothing has started then.
    """
    configs = {size: with_block_size(config, size) for size in sizes} or {0: config}
    jobs = {size: _job(one) for size, one in configs.items()}
    first = next(iter(jobs.values()))
    first.require_checkpoint(None)
    cluster = find_cluster(config.cluster)
    folder = RunFolder(Path(config.run.dir or f"runs/profile-{first.name}"))
    with open_session(config.cluster) as session, LiveView(len(jobs)) as view:
        start = str(first.starting_policy(session, cluster, view.progress, folder.path))
        best: dict[int, tuple[int, Ranked]] = {}  # by size: the number of blocks, and the best plan
        for size, job in jobs.items():
            session.clear()
            workflow = job.workflow(start)
            profile, path = measured_profile(job, cluster, workflow, session, view.progress, folder.path)
            name, of = (f"profile_{size}.json", f", {size} rows per block") if size else ("profile.json", "")
            folder.write_text(name, path.read_text(encoding="utf-8"))
            view.note(text_table(profile.rows(), f"{profile.name} on {cluster.description}{of}, seconds and MB:"))
            view.note(f"{folder.path / name}, kept as {path}")
            if size:
                found = rank(Pricer(as_measured(workflow, profile), profile, linked(cluster, profile)))
                best[size] = workflow.num_blocks, found.best
        if best:
            view.note(text_table(_rows(best), "best plan of each size, predicted:"))
            view.note("another size of blocks trains other weights, in their last bits: the config chooses it, no plan")


def _rows(best: Mapping[int, tuple[int, Ranked]]) -> list[dict[str, str]]:
    least_s = min(plan.iteration_s for _, plan in best.values())
    return [
        {
            "rows per block": str(size),
            "blocks": str(blocks),
            "best plan": plan.label,
            "s/iteration": f"{plan.iteration_s:.3g}",
            "of the least": f"{plan.iteration_s / least_s:.2f}",
        }
        for size, (blocks, plan) in best.items()
    ]


def _job(config: Config) -> EmbodiedJob | ReasoningJob:
    return ReasoningJob(config) if isinstance(config, MathConfig) else EmbodiedJob(config)
