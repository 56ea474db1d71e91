"""Overrides and the files under configs/ become one typed, checked config; imports nothing heavy.

composition.py  presets, files and overrides are merged and become dataclasses
overrides.py    one `key=value`: read by the type of its key
checkpoints.py  configs of evaluations and exports, whose defaults are those of a checkpoint
explain.py      errors for a wrong key or value: its path, the rule, the next action
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_embodied.compose.checkpoints import compose_answers, compose_evaluate, compose_export
from rlinf_embodied.compose.composition import (
    CONFIG_DIR,
    FILE_SUFFIXES,
    choices,
    compose,
    groups,
    load,
    read_mapping,
    split,
    stored_variant,
    to_yaml,
)
from rlinf_embodied.compose.explain import keys
from rlinf_embodied.compose.overrides import chosen, names_of
from rlinf_embodied.config import ImitationConfig, MathConfig, TrainConfig


def compose_train(overrides: Sequence[str] = ()) -> TrainConfig:
    """Returns the config of experiments/train_vla.py; raises ConfigError as `compose` does."""
    return compose(TrainConfig, overrides)


def compose_sft(overrides: Sequence[str] = ()) -> ImitationConfig:
    """Returns the config of experiments/train_sft.py; raises ConfigError as `compose` does."""
    return compose(ImitationConfig, overrides)


def compose_math(overrides: Sequence[str] = ()) -> MathConfig:
    """Returns the config of experiments/train_llm_math.py; raises ConfigError as `compose` does."""
    return compose(MathConfig, overrides)
