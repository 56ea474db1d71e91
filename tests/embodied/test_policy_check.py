"""A user's wrong policy is refused before it trains, and what is wrong is named with what to do."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import tiny, train

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.policy_folder import new_policy, require_policy_class, save_policy
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from tests.observations import env_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "experiments/examples"
sys.path.append(str(EXAMPLES))

from own_policy import OwnPolicy  # noqa: E402  # pyright: ignore[reportMissingImports]

ROWS = 4
ENV = env_spec("PushCube-v1", ROWS, 5, 50, 3, 8, 12, 64, ())
CONFIG = PolicyConfig(_target_=f"{__name__}.Right", name="mine", critic=Critic.observation, options={"width": 8})


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    """Policies are named by dotted paths; this module is one."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


class Right(OwnPolicy):
    """Nothing is wrong with it."""


@dataclass(kw_only=True, slots=True)
class Width:
    """Separate options, in addition to those that the policy that it comes from has not."""

    width: int = 64


class Wider(OwnPolicy):
    options_type = Width


class OnlyPromises(Policy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None: ...


class NotCloned(OwnPolicy):
    imitation_loss = ImitationPolicy.imitation_loss


class Raises(OwnPolicy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        raise ValueError("no such body")


class NoModule(OwnPolicy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        super().__init__(config, env, seed)
        del self.module


class ForgetsConfig(OwnPolicy):
    def save(self, folder: Path) -> None:
        torch.save(self.module.state_dict(), folder / "weights.pt")


def named(name: str) -> PolicyConfig:
    return replace(CONFIG, _target_=f"{__name__}.{name}")


def test_a_right_one_passes() -> None:
    require_policy_class(CONFIG, cloned=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Rigth", "has no attribute 'Rigth'"),
        (
            "OnlyPromises",
            r"OnlyPromises has no encode, act, evaluate, value, .*, save, from_folder: write what is missing",
        ),
        ("ROWS", r"ROWS is called with \(config, env, seed\)"),
    ],
)
def test_a_class_that_cannot_be_a_policy_is_refused_before_it_is_made(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy._target_ is '.*{name}', but .*{words}"):
        require_policy_class(named(name), cloned=False)


def test_a_policy_that_cannot_be_cloned_says_so_and_what_else_can_be_done() -> None:
    with pytest.raises(ConfigError, match=r"has no imitation_loss: .* warm_start.from_scratch=true"):
        require_policy_class(named("NotCloned"), cloned=True)
    with pytest.raises(ConfigError, match="so it cannot be cloned"):
        NotCloned(CONFIG, ENV, 0).imitation_loss({}, torch.zeros(1), {})


def test_a_constructor_that_raises_is_shown_by_its_own_line() -> None:
    with pytest.raises(ConfigError) as caught:
        new_policy(named("Raises"), ENV, 0, "cpu")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("making it for PushCube-v1 raised ValueError: no such body, from")
    assert lines[1].endswith('in __init__: raise ValueError("no such body")')
    assert lines[2:] == ["Fix it there"]
    with pytest.raises(ConfigError, match="NoModule has no attribute module: set it in __init__"):
        new_policy(named("NoModule"), ENV, 0, "cpu")


def test_a_folder_without_config_json_is_named(tmp_path) -> None:
    config = tiny()
    with pytest.raises(CheckpointError, match=r"ForgetsConfig.save wrote \['weights.pt'\], but .* config.json"):
        save_policy(ForgetsConfig(CONFIG, ENV, 0), tmp_path, config.env, config.policy)


# ------------------------------------------------------------------------------------------------------ in a whole run
def run(folder: Path, target: str, *overrides: str) -> dict:
    own = ["policy=state", f"policy._target_={target}", "policy.critic=observation", "algorithm=ppo_dense"]
    short = ["run.num_iterations=1", "eval.num_episodes=2", "eval.num_envs=2"]
    return train(tiny(*own, *short, f"run.dir={folder}", *overrides))


def test_ppo_without_a_critic_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Right, "value_parameters", lambda self: [])
    with pytest.raises(ConfigError, match=r"value_parameters\(\) of the policy \w+ is empty: .* algorithm=grpo"):
        run(tmp_path, f"{__name__}.Right")


# -------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("policies.tiny_vla.TinyVLA", {"widht": 3}, r"widht is 3, but there is no such option: .*stem_width"),
        ("policies.flow_vla.FlowVLA", {"steps": "many"}, r"policy.options.steps is 'many', but .*Integer.*FlowOptions"),
        ("policies.flow_vla.FlowVLA", {"steps": 0}, r"policy.options.steps is 0, but it must be at least 1"),
        (f"{__name__}.Wider", {"width": "wide"}, r"policy.options.width is 'wide', but .*Integer.*Width"),
    ],
)
def test_options_that_a_policy_does_not_have_are_refused_before_anything_starts(target, options, words) -> None:
    config = tiny("warm_start.from_scratch=true")
    config.policy = replace(config.policy, _target_=target, options=options)
    with pytest.raises(ConfigError, match=words):
        EmbodiedJob(config).require_checkpoint(None)
