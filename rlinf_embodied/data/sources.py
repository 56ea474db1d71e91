"""The problems that a config names."""

from __future__ import annotations

from typing import cast

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.jsonl import JsonlProblems
from rlinf_embodied.data.problems import ProblemSource, Split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.targets import load_plug_in


def problem_source(config: DataConfig, seed: int) -> ProblemSource:
    """Returns the streams of a config; `seed` decides what is drawn, or in which order files are gone through.

    Raises:
        ConfigError: there is no such level, or data._target_ makes no source.
        DataError: a file cannot be used.
    """
    if config._target_ is not None:
        return _own_source(config, config._target_, seed)
    if not config.files:
        return GeneratedProblems(config.level, seed)
    whole = config.files.get("all")
    return JsonlProblems(
        whole if whole is not None else {Split(name): file for name, file in config.files.items()},
        seed,
        question_column=config.question_column,
        answer_column=config.answer_column,
        columns=config.columns,
    )


def _own_source(config: DataConfig, target: str, seed: int) -> ProblemSource:
    made = load_plug_in(target, "data._target_", "data", "seed")(config, seed)
    if not isinstance(made, ProblemSource):
        raise ConfigError(
            f"data._target_ is {target!r}, but it returned a {type(made).__name__}: return an object with the methods "
            "size and batch of ProblemSource (rlinf_embodied/data/problems.py)"
        )
    return cast(ProblemSource, made)
