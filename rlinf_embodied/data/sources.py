"""The problems that a config names."""

from __future__ import annotations

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.jsonl import JsonlProblems
from rlinf_embodied.data.problems import ProblemSource, Split


def problem_source(config: DataConfig, seed: int) -> ProblemSource:
    """Returns the streams of a config; `seed` decides what is drawn, or in which order files are gone through.

    Raises:
        ConfigError: there is no such level.
        DataError: a file cannot be used.
    """
    if not config.files:
        return GeneratedProblems(config.level, seed)
    columns = {"question_column": config.question_column, "answer_column": config.answer_column}
    if "all" in config.files:
        return JsonlProblems(config.files["all"], seed, **columns)
    return JsonlProblems({Split(name): file for name, file in config.files.items()}, seed, **columns)
