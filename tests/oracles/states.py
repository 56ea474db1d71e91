"""Hidden states of every layer, for goldens of single layers."""

from __future__ import annotations

import re

from torch import Tensor

from policies.openvla.network import OpenVLA, Sequence
from tests.oracles.goldens import Goldens


def compare_states(
    goldens: Goldens, prefix: str, network: OpenVLA, sequence: Sequence, mask: Tensor, where: Tensor | None = None
) -> Tensor:
    """Compares what enters each layer, and what leaves the last norm; returns the latter [B, S, D]."""
    done = network.language_model.model(
        inputs_embeds=sequence.embeddings,
        position_ids=sequence.positions,
        attention_mask=mask,
        output_hidden_states=True,
    )
    goldens.compare(f"{prefix}.inputs_embeds", sequence.embeddings, where)
    for match in goldens.names(rf"{re.escape(prefix)}\.hidden_states\.(\d+)"):
        goldens.compare(match[0], done.hidden_states[int(match[1])], where)
    goldens.compare(f"{prefix}.hidden_states_final", done.last_hidden_state, where)
    return done.last_hidden_state
