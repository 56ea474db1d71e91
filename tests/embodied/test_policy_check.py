"""A wrong policy of one's own is refused before it trains, and what is wrong is named with what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import tiny, train
from torch import Tensor, nn

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.policy_check import check_policy, new_policy, require_policy_class
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.errors import CheckpointError, ConfigError, PlugInError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import Features, Policy, PolicyOutput, Record
from tests.observations import env_spec, observed

EXAMPLES = Path(__file__).resolve().parents[2] / "experiments/examples"
sys.path.append(str(EXAMPLES))

from own_policy import ProprioPolicy  # noqa: E402  # pyright: ignore[reportMissingImports]

ROWS = 4
ENV = env_spec("PushCube-v1", ROWS, 5, 50, 3, 8, 12, 64, ())
CONFIG = PolicyConfig(
    _target_=f"{__name__}.Right", name="mine", critic=Critic.observation, options={"num_bins": 5, "width": 8}
)


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    """Policies are named by dotted paths; this module is one."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


class Right(ProprioPolicy):
    """Nothing is wrong with it."""


@dataclass(kw_only=True, slots=True)
class Width:
    """Options of its own, beside those that the policy that it comes from has not."""

    width: int = 64


class Wider(ProprioPolicy):
    options_type = Width


class OnlyPromises(Policy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None: ...


class Raises(ProprioPolicy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        raise ValueError("no such body")


class NoModule(ProprioPolicy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        super().__init__(config, env, seed)
        del self.module


class WrongChunk(ProprioPolicy):
    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        super().__init__(config, replace(env, chunk=1), seed)


class OutsideModule(ProprioPolicy):
    def policy_parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(1))]


class NoRows(ProprioPolicy):
    def encode(self, observation: Observation) -> Features:
        return {"proprio": observation.proprio.mean(0)}


def output_of(change: Callable[[PolicyOutput], PolicyOutput]) -> type[ProprioPolicy]:
    class Changed(ProprioPolicy):
        def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
            return change(super().act(features, noise, temperature))

    return Changed


class Dropout(ProprioPolicy):
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        drawn = torch.rand(ROWS, 5, 3) if noise is not None else None
        return super().act(features, drawn, temperature)


class ForgetsTemperature(ProprioPolicy):
    def evaluate(self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True):
        return super().evaluate(features, record, 2 * temperature, entropy_gradient)


class ValuePerRow(ProprioPolicy):
    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        return super().value(features, privileged)[:, 0]


class Interrupts(ProprioPolicy):
    def evaluate(self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True):
        if torch.is_grad_enabled() and len(record["tokens"]) < 16:  # in a minibatch
            return {}["nothing"]
        return super().evaluate(features, record, temperature, entropy_gradient)


class ForgetsConfig(ProprioPolicy):
    def save(self, folder: Path) -> None:
        torch.save(self.module.state_dict(), folder / "weights.pt")


def seen() -> Observation:
    draw = torch.Generator().manual_seed(0)
    return observed(torch.randn(ROWS, 8, generator=draw), ("push",) * ROWS, None, torch.randn(ROWS, 12, generator=draw))


def check(kind: type[ProprioPolicy], config: PolicyConfig = CONFIG) -> None:
    check_policy(kind(config, ENV, 0), config, ENV, seen())


def named(name: str) -> PolicyConfig:
    return replace(CONFIG, _target_=f"{__name__}.{name}")


def test_a_right_one_passes() -> None:
    require_policy_class(CONFIG, cloned=False)
    check(Right)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Rigth", "has no Rigth"),
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
    with pytest.raises(ConfigError, match=r"has no imitation_loss, .* warm_start.from_nothing=true"):
        require_policy_class(CONFIG, cloned=True)
    with pytest.raises(ConfigError, match="so it cannot be cloned"):
        Right(CONFIG, ENV, 0).imitation_loss({}, torch.zeros(1), {})


def test_a_constructor_that_raises_is_shown_by_its_own_line() -> None:
    with pytest.raises(ConfigError) as caught:
        new_policy(named("Raises"), ENV, 0, "cpu")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("making it for PushCube-v1 raised ValueError: no such body, from")
    assert lines[1].endswith('in __init__: raise ValueError("no such body")')
    assert lines[2:] == ["Fix it there"]
    with pytest.raises(ConfigError, match="NoModule has no attribute module: set it in __init__"):
        new_policy(named("NoModule"), ENV, 0, "cpu")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrongChunk, r"spec.chunk is 1, but that of the env is 5: take it from the EnvSpec"),
        (OutsideModule, "OutsideModule trains a parameter that is not in .module"),
        (NoRows, "NoRows raised IndexError: Dimension out of range"),
        (output_of(lambda o: replace(o, actions=2 * o.actions + 2)), r"actions up to .*: return them in \[-1, 1\]"),
        (output_of(lambda o: replace(o, actions=o.actions[:, :1])), r"actions as float32 \[4, 1, 3\]: .*\[4, 5, 3\]"),
        (
            output_of(lambda o: replace(o, actions=o.actions.double())),
            r"actions as float64 \[4, 5, 3\]: return float32",
        ),
        (
            output_of(lambda o: replace(o, record={"tokens": o.record["tokens"][0]})),
            "Changed has 5 rows of 'tokens' in what encode or act returned for 4",
        ),
        (output_of(lambda o: replace(o, log_probs=o.log_probs / 0)), "log_probs that are NaN or infinite"),
        (Dropout, "act chose otherwise for the same noise: draw nothing"),
        (ForgetsTemperature, "evaluate gives other log-probs than act for its choices"),
        (ValuePerRow, r"value returned V as float32 \[4\]: return float32 \[4, 5\]"),
    ],
)
def test_what_a_method_returns_wrongly_is_named_with_what_is_needed(kind: type[ProprioPolicy], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy._target_ is .*{words}"):
        check(kind)


def test_a_critic_on_features_that_the_config_calls_privileged_is_told_the_key() -> None:
    with pytest.raises(ConfigError, match=r"(?s)value raised KeyError: 'proprio', from.*set policy.critic=observation"):
        check(Right, replace(CONFIG, critic=Critic.privileged))


def test_a_folder_without_config_json_is_named(tmp_path) -> None:
    config = tiny()
    with pytest.raises(CheckpointError, match=r"ForgetsConfig.save wrote \['weights.pt'\], but .* config.json"):
        save_policy(ForgetsConfig(CONFIG, ENV, 0), tmp_path, config.env, config.policy)


# ------------------------------------------------------------------------------------------------------ in a whole run
def run(folder: Path, target: str, *overrides: str) -> dict:
    own = ["policy=state", f"policy._target_={target}", "policy.critic=observation", "algorithm=ppo_dense"]
    short = ["run.num_iterations=1", "eval.num_episodes=2", "eval.num_envs=2"]
    return train(tiny(*own, *short, f"run.dir={folder}", *overrides))


def test_a_run_is_refused_by_name_before_its_first_call(tmp_path) -> None:
    with pytest.raises(ConfigError, match="evaluate gives other log-probs than act"):
        run(tmp_path, f"{__name__}.ForgetsTemperature")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_what_raises_in_the_middle_is_shown_by_its_own_line(tmp_path) -> None:
    with pytest.raises(
        PlugInError, match=r"failed in actor.run .* KeyError: 'nothing', from\n  .*line \d+, in evaluate"
    ):
        run(tmp_path, f"{__name__}.Interrupts", "algorithm.critic_warmup_iterations=0")


def test_ppo_without_a_critic_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Right, "value_parameters", lambda self: [])
    with pytest.raises(ConfigError, match=r"value_parameters\(\) of the policy \w+ is empty: .* algorithm=grpo"):
        run(tmp_path, f"{__name__}.Right")


# -------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (
            "policies.tiny_vla.TinyVLA",
            {"widht": 3},
            r"widht is 3, but there is no such option: .*stem_width",
        ),
        (
            "policies.state_policy.StatePolicy",
            {"width": 3},
            r"width is 3, but .*: use one of num_bins",
        ),
        (
            "policies.flow_vla.FlowVLA",
            {"stepz": 3},
            r"stepz is 3, .*: did you mean policy.options.steps",
        ),
        ("policies.flow_vla.FlowVLA", {"steps": "many"}, r"policy.options.steps is 'many', but .*Integer.*FlowOptions"),
        ("policies.flow_vla.FlowVLA", {"steps": 0}, r"policy.options.steps is 0, but it must be at least 1"),
        ("policies.openvla.policy.OpenVLAPolicy", {"top_k": -1}, r"policy.options.top_k is -1, but it counts tokens"),
        (f"{__name__}.Wider", {"width": "wide"}, r"policy.options.width is 'wide', but .*Integer.*Width"),
    ],
)
def test_options_that_a_policy_does_not_have_are_refused_before_anything_starts(target, options, words) -> None:
    config = tiny("warm_start.from_nothing=true")
    config.policy = replace(config.policy, _target_=target, options=options)
    with pytest.raises(ConfigError, match=words):
        EmbodiedJob(config).require_checkpoint(None)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("policies.tiny_vla.TinyVLA", {}),
        ("policies.flow_vla.FlowVLA", {"steps": 2}),
        (f"{__name__}.Wider", {"width": 3}),
    ],
)
def test_options_that_it_has_are_taken(target, options) -> None:
    config = tiny("warm_start.from_nothing=true")
    config.policy = replace(config.policy, _target_=target, options=options)
    EmbodiedJob(config).require_checkpoint(None)
