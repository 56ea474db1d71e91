"""Policies in a dataset's units: their losses and actions are those of a plain policy on normalised data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.flow_vla import FlowVLA
from policies.tiny_vla import TinyVLA
from rlinf_embodied.config import NormMode, PolicyConfig
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.statistics import vector_statistics
from rlinf_embodied.errors import CheckpointError, ConfigError
from tests.observations import env_spec, observed

ROWS, CHUNK, ACTION, STATE = 4, 3, 2, 6
ENV = env_spec("PickCube-v1", ROWS, CHUNK, 12, ACTION, STATE, 9, 16, ("base_camera",))
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "stem_width": 16, "keypoints": 4, "critic_hidden_size": 16}
DRAW = torch.Generator().manual_seed(0)
ACTIONS = torch.randn(ROWS, CHUNK, ACTION, generator=DRAW) * torch.tensor([40.0, 0.01]) + torch.tensor([90.0, -0.2])
PROPRIO = torch.randn(ROWS, STATE, generator=DRAW) * 100
IMAGES = torch.randint(0, 256, (ROWS, 1, 16, 16, 3), generator=DRAW, dtype=torch.uint8)
STATISTICS = {
    name: {kind: torch.from_numpy(value).float() for kind, value in vector_statistics(values.numpy()).items()}
    for name, values in (("action", ACTIONS.flatten(0, 1)), ("observation.state", PROPRIO))
}


def shown(proprio: torch.Tensor):
    return observed(proprio, ("pick up the cube",) * ROWS, IMAGES, torch.zeros(ROWS, 9))


@pytest.mark.parametrize("mode", [NormMode.min_max, NormMode.quantiles, NormMode.mean_std])
@pytest.mark.parametrize("kind", [TinyVLA, FlowVLA])
def test_a_policy_in_data_units_is_a_plain_one_on_normalised_data(kind: type, mode: NormMode, tmp_path: Path) -> None:
    plain_config = PolicyConfig(_target_=f"{kind.__module__}.{kind.__name__}", options=SMALL)
    config = replace(plain_config, normalise_actions=mode, normalise_state=mode)
    plain, made = kind(plain_config, ENV, 3), kind(config, ENV, 3)
    made.normalise_by(STATISTICS)
    made.set_statistics("proprio", torch.full((STATE,), 5.0), torch.full((STATE,), 5.0))  # it is normalised already
    made.save(tmp_path)
    action, state = (Normalisation(name, mode, STATISTICS[name]) for name in ("action", "observation.state"))
    noise = made.imitation_noise
    targets = {} if noise is None else {"noise": noise.draw(0, "test", range(ROWS))}
    features = plain.encode_trainable(shown(state.forward(PROPRIO)))
    expected, greedy = plain.imitation_loss(features, action.forward(ACTIONS), targets), plain.act(features, None, 1.0)
    for policy in (made, kind.from_folder(tmp_path, config=config)):
        features = policy.encode_trainable(shown(PROPRIO))
        torch.testing.assert_close(policy.imitation_loss(features, ACTIONS, targets), expected)
        said = greedy.record["chain"][:, -1] if kind is FlowVLA else greedy.actions
        torch.testing.assert_close(policy.act(features, None, 1.0).actions, action.inverse(said))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda step: step.pop("state_file"), "has min_max and no statistics for observation.state"),
        (lambda step: step["config"]["norm_map"].pop("ACTION"), "has identity and statistics for action"),
    ],
)
def test_a_folder_whose_statistics_are_not_those_of_its_config_is_refused(damage, message, tmp_path: Path) -> None:
    config = PolicyConfig(
        _target_="policies.tiny_vla.TinyVLA",
        normalise_actions=NormMode.min_max,
        normalise_state=NormMode.min_max,
        options=SMALL,
    )
    policy = TinyVLA(config, ENV, 3)
    policy.normalise_by(STATISTICS)
    policy.save(tmp_path)
    file = tmp_path / "policy_preprocessor.json"
    content = json.loads(file.read_text())
    damage(content["steps"][0])
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{message}, but config.json has min_max: copy the folder again"):
        TinyVLA.from_folder(tmp_path)


def test_statistics_of_another_robot_are_refused() -> None:
    policy = TinyVLA(PolicyConfig(normalise_actions=NormMode.min_max, options=SMALL), ENV, 3)
    with pytest.raises(ConfigError, match=r"policy.normalise_actions is 'min_max', .* 6 dimensions, and the env's 2"):
        policy.normalise_by({"action": STATISTICS["observation.state"]})
    with pytest.raises(ConfigError, match=r"the data has no action: use a LeRobot or RLDS dataset"):
        policy.normalise_by({})
