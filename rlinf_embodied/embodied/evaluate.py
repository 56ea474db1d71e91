"""What experiments/evaluate.py does: check the fingerprint, run the episodes, write eval_info.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlinf_embodied.config import Critic, EvaluateConfig, PolicyConfig, RecoveryConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.embodied.detectors import seeds_of_training
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationEnvConfig, file_name, held_out, policy_stage
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER
from rlinf_embodied.embodied.outcome import EvaluationResult, unsolved
from rlinf_embodied.embodied.policy_folder import (
    USE_ITS_OWN,
    differences,
    env_differences,
    fingerprint,
    require_policy_class,
    trained_under,
)
from rlinf_embodied.embodied.serving import remote_policy
from rlinf_embodied.embodied.starting_point import on_cores, require_env_target
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.runtime.session import find_cluster, make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.paired import PairedRate, paired_mean
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.tables import text_table
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.workflow.graph import StageSpec

_SB3 = PolicyConfig(_target_="policies.sb3.StableBaselinesPolicy", name="sb3", critic=Critic.observation)


def evaluate_command(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Two arms of a comparison have their own folders, and what is returned is written to comparison.json.

    Raises:
        CheckpointError: the checkpoint is missing or foreign, was trained under other conditions, or fits other sizes.
    """
    what = "compare" if config.compare else config.policy
    default = f"runs/evaluate-{file_name(config.env.task)}-{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    where = Path(config.run.dir or default)
    # by default only a single evaluation of a checkpoint also samples actions
    if config.compare or config.perturb.axes or config.policy != "checkpoint":
        config = replace(config, eval=replace(config.eval, sampled_episodes=config.eval.sampled_episodes or 0))
    arms = _arms(config)
    if not arms:
        return _evaluate(config, where)[1]
    results: list[EvaluationResult] = []
    for name, (label, arm) in zip("ab", arms, strict=True):
        print(f"{name}: {label}")
        results.append(_evaluate(arm, where / name)[0])
    labels = [label for label, _ in arms]
    content = {"a": labels[0], "b": labels[1], **compared(results[0], results[1], config.resolution)}
    if all(arm.policy == "checkpoint" for _, arm in arms):
        content["training_differs"] = env_differences(*(str(arm.checkpoint) for _, arm in arms))
    print(comparison_text(content))
    print(f"written to {RunFolder(where).write_json('comparison.json', content)}")
    return content


def _arms(config: EvaluateConfig) -> list[tuple[str, EvaluateConfig]]:
    """Returns the two evaluations of a comparison with their names for people; none for a single evaluation."""
    if config.compare:
        kinds = {name: name if name in ("expert", "random") else "checkpoint" for name in config.compared}
        kinds |= {name: "sb3" for name in config.compared if name.endswith(".zip")}
        kinds |= {name: "remote" for name in config.compared if "://" in name}
        folder = lambda name: name if kinds[name] in ("checkpoint", "sb3") else None  # noqa: E731
        remote = lambda name: replace(config.remote, url=name if kinds[name] == "remote" else None)  # noqa: E731
        arm = lambda name: replace(  # noqa: E731
            config, compare=None, policy=kinds[name], checkpoint=folder(name), remote=remote(name)
        )
        return [(name, arm(name)) for name in config.compared]
    if not config.perturb.axes:
        return []
    perturbed = replace(config.env, perturb=config.perturb)
    return [(f"env.perturb={env.perturb.axes}", replace(config, env=env)) for env in (config.env, perturbed)]


def compared(a: EvaluationResult, b: EvaluationResult, resolution: float) -> dict[str, object]:
    """Returns how two results on the same episodes differ, as JSON: each metric's difference is b's minus a's."""
    of = lambda result, name: [episode.metrics[name] for episode in result.episodes]  # noqa: E731
    assert [e.seed for e in a.episodes] == [e.seed for e in b.episodes]
    found: dict[str, object] = {"num_episodes": len(a.episodes)}
    for name in ("success_once", "success_at_end") if a.once is not None else ():
        pairs = PairedRate.of(*([value > 0 for value in of(result, name)] for result in (a, b)))
        found[name] = pairs.summary(resolution)
    return found | {"return": paired_mean(of(a, "return"), of(b, "return"))}


def comparison_text(content: Mapping[str, Any]) -> str:
    """Returns a comparison for people."""
    lines = [f"trained in other envs: {text}" for text in content.get("training_differs", ())]
    for name in (name for name in ("success_once", "success_at_end") if name in content):
        found, number = content[name], content["num_episodes"]
        low, high = (100 * end for end in found["difference_interval"])
        line = f"{name} of b - a: {100 * found['difference']:+.1f} points [{low:+.1f}, {high:+.1f}]"
        line += f", McNemar's p = {found['p_value']:.2g}; b alone solved {found['only_b']}, a alone {found['only_a']}"
        lines.append(f"{line} of {number} episodes")
        if found["p_value"] >= 0.05:
            rule = f"eval.num_episodes={found['num_needed']} would show one of {100 * found['resolution']:g} points"
            lines.append(f"  no difference is shown; {rule} in 4 cases of 5")
    low, high = content["return"]["difference_interval"]
    return "\n".join([*lines, f"return of b - a: {content['return']['difference']:+.3g} [{low:+.3g}, {high:+.3g}]"])


def _evaluate(config: EvaluateConfig, where: Path) -> tuple[EvaluationResult, dict[str, Any]]:
    """Runs one evaluation; returns its result, and what eval_info.json of the folder holds."""
    config, cluster = replace(config, env=on_cores(config.env, config.cluster)), find_cluster(config.cluster)
    videos = str(where / "videos") if config.eval.record_video or config.film_failures else None
    acting = config.policy if config.policy in ("expert", "random") else "policy"
    asked = held_out(config.env, config.eval, config.run, videos, acting)
    stage = _policy_stage(config, asked, cluster.kind)
    require_env_target(config.env)
    folder = RunFolder(where)
    with closing(make_session(config.cluster)) as session:
        view = LiveView(1)
        used = seeds_of_training(Path(config.checkpoint)) if config.checkpoint else {}
        table, most = folder.path / "episodes.csv", config.eval.num_videos
        choose_films = (lambda episodes: unsolved(episodes)[:most]) if config.film_failures else None

        def evaluated() -> tuple[EvaluationResult, str]:
            evaluation = Evaluation(asked, stage, session, cluster, None, view.progress, used, table, choose_films)
            holds = evaluation.env_spec.has_success or not config.film_failures
            rule = f"{evaluation.env_spec.task} does not report success"
            require(holds, "film_failures", config.film_failures, rule, "leave it out")
            return evaluation.run(0, last=True), evaluation.env_spec.backend

        recovery = Recovery(session, RecoveryConfig(), view.note)
        result, backend = recovery.repeat("evaluation", evaluated, session.clear)
        _write(folder, config, result, backend)
    _print(config, result)
    filmed = f", videos in {folder.videos}" if any(folder.videos.glob("*/*.mp4")) else ""
    print(f"written to {folder.path / 'eval_info.json'}{filmed}")
    return result, folder.read_json("eval_info.json")


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
    if config.policy not in ("checkpoint", "remote"):
        return policy_stage(name, None, "", asked)
    is_remote = config.policy == "remote"
    checkpoint = str(config.remote.url) if is_remote else checkpoint
    trained = remote_policy(config.remote, config.env) if is_remote else trained_under(checkpoint)
    found = differences(trained.fingerprint, fingerprint(config.env, trained.policy, kind))
    if trained.fingerprint and found and not config.allow_mismatch:
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
    for text in result.warnings:
        print(f"warning: {text}")
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
