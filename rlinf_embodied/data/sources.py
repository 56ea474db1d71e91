"""The source of problems that a config names."""

from __future__ import annotations

from typing import cast

from rlinf_embodied.config import DataConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.files import FileProblems
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import ProblemSource
from rlinf_embodied.plug_ins import load_plug_in


def problem_source(config: DataConfig, seed: int) -> ProblemSource:
    """Returns the streams of a config; `seed` determines the drawn problems, or the order of a file's rows.

    Raises:
        ConfigError: a level does not exist, or data._target_ does not return a ProblemSource.
        DataError: a file cannot be used.
    """
    if config._target_ is None:
        return FileProblems(config, seed) if config.files else GeneratedProblems(config.level, seed)
    source = load_plug_in(config._target_, "data._target_", "data", "seed")(config, seed)
    rule, kind = "it returns no source of problems", type(source).__name__
    action = "return an object with the methods size and batch of ProblemSource (rlinf_embodied/data/problems.py)"
    require(isinstance(source, ProblemSource), "data._target_", f"{config._target_} -> {kind}", rule, action)
    return cast(ProblemSource, source)
