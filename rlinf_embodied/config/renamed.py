"""Names in files of earlier runs, and what they are called now: such files are read, the command line is told.

A key that was renamed stays here for as long as a config.yaml or a checkpoint may hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from rlinf_embodied.errors import ConfigError

KEYS = {
    "algorithm.drop_uniform_groups": "algorithm.drop_zero_variance_groups",
    "algorithm.importance_cap": "algorithm.tis_cap",
    "algorithm.max_idle_iterations": "algorithm.max_zero_advantage_iterations",
    "algorithm.max_refills": "algorithm.max_resamples",
    "data.form": "data.prompt_template",
    "eval.forced_start": "eval.forced_prefix",
    "generation.num_slots": "generation.max_num_seqs",
    "generation.rows_together": "generation.rows_per_batch",
    "warm_start.worked_share": "warm_start.chain_of_thought_share",
}
CHOICES = {("warm_start", "worked"): "chain_of_thought"}  # (group, choice)
STAGES = {"proximal": "old_log_probs"}  # of our own workflows


def require_current(key: str) -> None:
    """Checks that a key of the command line bears its present name.

    Raises:
        ConfigError: it was renamed.
    """
    if key in KEYS:
        raise ConfigError(f"{key} is unknown: it is called {KEYS[key]} now; use {KEYS[key]}=<value>")


def require_current_choice(group: str, choice: str) -> None:
    """Checks that a choice of a group bears its present name.

    Raises:
        ConfigError: it was renamed.
    """
    current = CHOICES.get((group, choice))
    if current is not None:
        raise ConfigError(f"{group} is {choice!r}, but this choice is called {current} now: use {group}={current}")


def with_current_keys(saved: Mapping[str, object]) -> dict[str, object]:
    """Returns a saved config (plain sections with plain keys) under the present names, with its values as they were."""
    renamed = {key.partition(".")[::2]: new.partition(".")[2] for key, new in KEYS.items()}
    return {
        section: {renamed.get((section, key), key): value for key, value in cast("Mapping[str, object]", body).items()}
        if isinstance(body, Mapping)
        else body
        for section, body in saved.items()
    }


def current_stage(name: str, known: Collection[str]) -> str:
    """Returns what a workflow with the stages `known` calls a stage; a name that it has itself stays."""
    current = STAGES.get(name, name)
    return current if name not in known and current in known else name
