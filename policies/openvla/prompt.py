"""Instructions as token rows: OpenVLA's prompt, then the empty token that precedes the first action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError

BOS_TOKEN, STOP_TOKEN, EMPTY_TOKEN = 1, 2, 29871


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Prompts of unequal length in one rectangle: BOS, then padding, then the prompt, so that all rows end alike."""

    ids: Tensor  # int64 [B, L]
    present: Tensor  # bool [B, L], false at padding


def prompt_for(instruction: str) -> str:
    """Returns the prompt with which OpenVLA was trained."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def rows_of(prompts: Sequence[Sequence[int]], pad_token_id: int, width: int | None = None) -> TokenRows:
    """Returns token rows; the empty token is appended to prompts that do not end in it.

    Args:
        prompts: ids that begin with BOS.
        pad_token_id: id of padding.
        width: the number of columns; None: the length of the longest prompt.

    Raises:
        ConfigError: a prompt does not begin with BOS, or is longer than `width`.
    """
    ended = [[*ids] if ids and ids[-1] == EMPTY_TOKEN else [*ids, EMPTY_TOKEN] for ids in prompts]
    length = max(map(len, ended)) if width is None else width
    for ids in ended:
        if ids[0] != BOS_TOKEN:
            raise ConfigError(f"a prompt begins with token {ids[0]}, but it must begin with BOS ({BOS_TOKEN}): add it")
        rule, action = f"a prompt has {len(ids)} tokens", "use at least as many, or a shorter instruction"
        require(len(ids) <= length, "policy.options.prompt_length", length, rule, action)
    padded = [[BOS_TOKEN, *[pad_token_id] * (length - len(ids)), *ids[1:]] for ids in ended]
    present = [[True, *[False] * (length - len(ids)), *[True] * (len(ids) - 1)] for ids in ended]
    return TokenRows(torch.tensor(padded), torch.tensor(present))
