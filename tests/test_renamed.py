"""Files of earlier runs are read under present names, and the command line says what a renamed key is called now."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from rlinf_embodied.compose import MATH_GROUPS, TRAIN_GROUPS, choices, compose_math, compose_train, keys, load, to_yaml
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.config.renamed import CHOICES, KEYS, current_stage, with_current_stages
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.reasoning.policy_folder import FILE, trained_on
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.resume import checkpoint_to_resume

CHANGED = [  # none of them a default
    *("algorithm.drop_zero_variance_groups=false", "algorithm.tis_cap=1.5", "algorithm.max_resamples=1"),
    *("algorithm.max_zero_advantage_iterations=7", "data.prompt_template=natural", "eval.forced_prefix=false"),
    *("generation.max_num_seqs=9", "generation.rows_per_batch=64", "warm_start.chain_of_thought_share=0.25"),
]


def earlier(config: MathConfig) -> dict[str, dict[str, object]]:
    """Returns a config as a file of an earlier run holds it."""
    saved = yaml.safe_load(to_yaml(config))
    for old, new in KEYS.items():
        section, _, key = new.partition(".")
        saved[section][old.partition(".")[2]] = saved[section].pop(key)
    return saved


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_the_command_line_is_told_the_present_key(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{old} is unknown: it is called {new} now; use {new}=<value>")):
        compose_math([f"{old}=1"])


def test_of_the_embodied_workflow_too() -> None:
    with pytest.raises(ConfigError, match=r"use algorithm.max_resamples=<value>"):
        compose_train(["algorithm=grpo", "algorithm.max_refills=1"])


def test_the_command_line_is_told_the_present_choice() -> None:
    with pytest.raises(ConfigError, match=r"warm_start is 'worked', .* use warm_start=chain_of_thought"):
        compose_math(["warm_start=worked"])


def test_present_names_exist_and_earlier_ones_do_not() -> None:
    known = {*keys(MathConfig), *keys(TrainConfig)}
    assert set(KEYS.values()) <= known
    assert not set(KEYS) & known
    for (group, old), new in CHOICES.items():
        assert group in {*MATH_GROUPS, *TRAIN_GROUPS}
        assert (old in choices(group, MathConfig), new in choices(group, MathConfig)) == (False, True)


def test_a_config_file_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    config = compose_math(CHANGED)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(earlier(config)), encoding="utf-8")
    assert set(KEYS.values()) <= {text.partition("=")[0] for text in CHANGED}
    assert load(path, MathConfig) == config != compose_math([])


def test_a_checkpoint_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    config = compose_math(CHANGED)
    sections = {name: earlier(config)[name] for name in ("data", "policy", "generation", "reward")}
    (tmp_path / FILE).write_text(json.dumps({"workflow": "reasoning", **sections}), encoding="utf-8")
    found = trained_on(tmp_path)
    assert (found.data, found.generation) == (config.data, config.generation)


def test_an_earlier_run_is_compared_with_the_config_under_present_names(tmp_path: Path) -> None:
    config = compose_math([*CHANGED, f"run.dir={tmp_path}"])
    state = {"progress": asdict(Progress()), "config": yaml.safe_dump(earlier(config))}
    checkpoint.save(
        tmp_path / "checkpoints", step=1, policy_writer=lambda folder: None, tensors={}, state=state, keep=1
    )
    found = checkpoint_to_resume(config)
    assert found is not None
    other = compose_math([*CHANGED, f"run.dir={tmp_path}", "algorithm.tis_cap=2.5"])
    with pytest.raises(ConfigError, match=r"algorithm.tis_cap is 2.5 here and 1.5 there"):
        checkpoint_to_resume(other)


def test_plans_of_an_earlier_run_name_the_stages_of_today() -> None:
    tree = {"temporal": [{"leaf": {"stage": "proximal", "devices": [0]}}, {"leaf": {"stage": "actor", "devices": [0]}}]}
    found = with_current_stages(tree, {"old_log_probs", "actor"})
    assert found == json.loads(json.dumps(tree).replace("proximal", "old_log_probs"))
    assert with_current_stages(tree, {"proximal", "actor"}) == tree  # a workflow that has a stage of that name
    assert current_stage("proximal", {"actor"}) == "proximal"
