"""Overrides and the files under configs/ become one typed, checked config; neither torch nor Ray is imported.

composition.py  presets, files and overrides are merged and become dataclasses
overrides.py    one `key=value`: read by the type of its key; errors with the path, the rule and the next action
commands.py     the commands' configs; an evaluation's defaults are those of its checkpoint
"""

from rlinf_embodied.compose.commands import (
    compose_answers,
    compose_evaluate,
    compose_evaluation,
    compose_export,
    compose_math,
    compose_serve_env,
    compose_train,
)
from rlinf_embodied.compose.composition import (
    CONFIG_DIR,
    FILE_SUFFIXES,
    choices,
    compose,
    groups,
    load,
    pin,
    read_mapping,
    split,
    stored_variant,
    to_yaml,
)
from rlinf_embodied.compose.overrides import explained, keys
