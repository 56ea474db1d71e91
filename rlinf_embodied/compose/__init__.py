"""The Hydra edge: overrides and the files under configs/ become one typed, checked config.

    commands.py     the configs of training and planning; the order of events
    evaluation.py   the config of an evaluation, from what its checkpoint says
    overrides.py    one override of the command line: read, and checked against the schema
    user_files.py   an env or a plan in a file of the user's, as a choice of its group
    files.py        the files under configs/, and configs of runs as files
    explain.py      what a wrong key or value is answered with

Nothing heavy is imported on the way.
"""

from rlinf_embodied.compose.commands import (
    CONTROL_GROUPS,
    MATH_GROUPS,
    PLANNING_GROUPS,
    SFT_GROUPS,
    TRAIN_GROUPS,
    compose_control,
    compose_emulation,
    compose_math,
    compose_planning,
    compose_sft,
    compose_train,
)
from rlinf_embodied.compose.evaluation import (
    ANSWERS_GROUPS,
    EVALUATE_GROUPS,
    EXPORT_GROUPS,
    compose_answers,
    compose_evaluate,
    compose_export,
)
from rlinf_embodied.compose.explain import keys
from rlinf_embodied.compose.files import CONFIG_DIR, FILE_SUFFIXES, choices, load, read_mapping, to_yaml
from rlinf_embodied.compose.overrides import PATH_KEYS
from rlinf_embodied.compose.user_files import stored_variant

__all__ = [
    "ANSWERS_GROUPS",
    "CONFIG_DIR",
    "CONTROL_GROUPS",
    "EVALUATE_GROUPS",
    "EXPORT_GROUPS",
    "FILE_SUFFIXES",
    "MATH_GROUPS",
    "PATH_KEYS",
    "PLANNING_GROUPS",
    "SFT_GROUPS",
    "TRAIN_GROUPS",
    "choices",
    "compose_answers",
    "compose_control",
    "compose_emulation",
    "compose_evaluate",
    "compose_export",
    "compose_math",
    "compose_planning",
    "compose_sft",
    "compose_train",
    "keys",
    "load",
    "read_mapping",
    "stored_variant",
    "to_yaml",
]
