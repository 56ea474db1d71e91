"""What experiments/evaluate.py does: check the fingerprint, run the episodes, write eval_info.json."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlinf_embodied.config import Critic, EvaluateConfig, PolicyConfig
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationEnvConfig, file_name, held_out, policy_stage
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER
from rlinf_embodied.embodied.outcome import EvaluationResult
from rlinf_embodied.embodied.policy_folder import (
    USE_ITS_OWN,
    differences,
    fingerprint,
    require_policy_class,
    trained_under,
)
from rlinf_embodied.embodied.starting_point import on_cores, require_env_target
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.runtime.session import find_cluster, make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.tables import text_table
from rlinf_embodied.workflow.graph import StageSpec

_SB3 = PolicyConfig(_target_="policies.sb3.StableBaselinesPolicy", name="sb3", critic=Critic.observation)


def evaluate_command(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing or foreign, was trained under other conditions, or fits other sizes.
    """
    config, cluster = replace(config, env=on_cores(config.env, config.cluster)), find_cluster(config.cluster)
    default = f"runs/evaluate-{file_name(config.env.task)}-{config.policy}-{time.strftime('%Y%m%d-%H%M%S')}"
    where = Path(config.run.dir or default)
    videos = str(where / "videos") if config.eval.record_video else None
    acting = config.policy if config.policy in ("expert", "random") else "policy"
    asked = held_out(config.env, config.eval, config.run, videos, acting)
    stage = _policy_stage(config, asked, cluster.kind)
    require_env_target(config.env)
    folder = RunFolder(where)
    with closing(make_session(config.cluster)) as session:
        view = LiveView(1)
        evaluation = Evaluation(asked, stage, session, cluster, progress=view.progress)
        result = evaluation.run(0)
        _write(folder, config, result, evaluation.env_spec.backend)
    _print(config, result)
    filmed = f", videos in {videos}" if any(folder.videos.glob("*/*.mp4")) else ""
    print(f"written to {folder.path / 'eval_info.json'}{filmed}")
    return folder.read_json("eval_info.json")


def _policy_stage(config: EvaluateConfig, asked: EvaluationEnvConfig, kind: str) -> StageSpec:
    """Returns the stage in which a policy acts, with its high-level one if there is one, or expert and random do.

    Raises:
        CheckpointError: the checkpoint is missing or foreign, or was trained under other conditions.
    """
    checkpoint, name = str(config.checkpoint), "eval_policy"
    if config.policy == "sb3":
        if not Path(checkpoint).is_file():
            raise CheckpointError(
                f"checkpoint is {checkpoint!r}, but policy=sb3 reads a file and there is none: give the <file>.zip "
                "that model.save(...) of Stable-Baselines3 wrote"
            )
        return policy_stage(name, _SB3, checkpoint, asked)
    if config.policy != "checkpoint":
        return policy_stage(name, None, "", asked)
    trained = trained_under(checkpoint)
    found = differences(trained.fingerprint, fingerprint(config.env, trained.policy, kind))
    if found and not config.allow_mismatch:
        raise CheckpointError(
            f"checkpoint {checkpoint} was trained under other conditions than this evaluation: {'; '.join(found)}. "
            f"{USE_ITS_OWN}, or allow_mismatch=true for a number that may mislead"
        )
    require_policy_class(trained.policy, cloned=False)
    levels, high = trained.hierarchy, f"{checkpoint}/{HIGH_FOLDER}"
    precisions = (trained.precision, trained.precision if levels is None else trained_under(high).precision)
    return policy_stage(name, trained.policy, checkpoint, asked, levels, high, precisions)


def _print(config: EvaluateConfig, result: EvaluationResult) -> None:
    print(f"{config.env.task}: {result}")
    if tasks := result.by_task():
        print(text_table([{"task": name, "success_once": f"{rate} of {rate.number}"} for name, rate in tasks.items()]))
    if result.once is not None:
        last = "once it is" if config.eval.end_at_success else f"when the episode's {config.env.horizon} steps are over"
        print(f"success_once: solved at any time; at_end: solved {last}")
    first, number = config.eval.seed, len(result.episodes)
    print(f"return {result.mean_return:.2f}, episode_len {result.episode_len:.1f}; seeds {first}..{first + number - 1}")


def _write(folder: RunFolder, config: EvaluateConfig, result: EvaluationResult, backend: str) -> None:
    episodes = [{"seed": e.seed, **({"task": e.task} if e.task else {}), **e.metrics} for e in result.episodes]
    tasks = {name: rate.summary("success_once") for name, rate in result.by_task().items()}
    content = result.summary() | {
        "policy": config.policy,
        "checkpoint": config.checkpoint,
        "greedy": config.eval.greedy,
        "first_seed": config.eval.seed,
        "env": asdict(config.env),
        "backend": backend,
        "versions": library_versions(),
        **({"tasks": tasks} if tasks else {}),
        "episodes": episodes,
    }
    folder.write_json("eval_info.json", content)
