"""What experiments/evaluate.py does with a language model: held-out problems, eval_info.json and samples.md."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_embodied.config import EvaluateAnswersConfig, RecoveryConfig
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.reasoning.evaluation import AnswerEvaluation, AnswerResult, AnswerStageConfig
from rlinf_embodied.reasoning.generation_stage import LanguageStageConfig
from rlinf_embodied.reasoning.policy_folder import FILE, trained_on
from rlinf_embodied.reasoning.verifier import reward_function
from rlinf_embodied.runtime.session import find_cluster, open_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.training.recovery import Recovery


def evaluate_command(config: EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing, foreign or damaged.
        ConfigError: reward._target_ or data._target_ cannot be used.
    """
    folder_of_policy = Path(config.checkpoint).expanduser()
    if (folder_of_policy / FILE).exists():  # one of this project's
        trained_on(folder_of_policy)
    reward_function(config.reward)
    problem_source(config.data, config.data.seed)
    folder = RunFolder(Path(config.run.dir or f"runs/evaluate-math-{time.strftime('%Y%m%d-%H%M%S')}"))
    cluster = find_cluster(config.cluster)
    model = LanguageStageConfig(config.policy, str(folder_of_policy), config.run.seed)
    evaluated = AnswerStageConfig(model, config.data, config.generation, config.reward, config.eval)
    with open_session(config.cluster) as session, LiveView(1, str(folder_of_policy)) as view:
        made = lambda: AnswerEvaluation(evaluated, session, cluster, last_step=0, progress=view.progress)  # noqa: E731
        recovery = Recovery(session, RecoveryConfig(), view.note)
        result = recovery.repeat("evaluation", lambda: made().run(0), session.clear)
    _write(folder, config, result)
    source = config.data._target_ or ", ".join(config.data.files.values()) or config.data.level
    print(f"{source}: greedy {result}")
    print(result.table(), end="")
    print(f"written to {folder.path / 'eval_info.json'} and samples.md")
    return folder.read_json("eval_info.json")


def _write(folder: RunFolder, config: EvaluateAnswersConfig, result: AnswerResult) -> None:
    sections = {name: asdict(getattr(config, name)) for name in ("data", "generation", "reward", "eval")}
    content = result.summary() | {"checkpoint": config.checkpoint, **sections, "versions": library_versions()}
    folder.write_json("eval_info.json", content)
    folder.write_text("samples.md", result.table())
