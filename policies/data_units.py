"""Policies whose states and actions are in the units of a dataset: normalised on the way in, un-normalised in `act`.

policy_preprocessor.json  policy_postprocessor.json      how, as LeRobot's processors read it; statistics beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from policies.checkpoint_folder import KeptInFolder
from policies.critic import Criticised
from policies.lerobot_processors import NORMALISE, POST, PRE, UNNORMALISE, read_normalisation, read_steps, write_steps
from rlinf_embodied.config import NormMode, PolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.errors import CheckpointError, DataError
from rlinf_embodied.interfaces.envs import EnvSpec

_KINDS = {STATE: "STATE", ACTION: "ACTION"}


class InDataUnits(KeptInFolder, Criticised):
    """Keeps a policy in a folder, with its normalisation; without one, actions lie in [-1, 1]."""

    normalisation: Mapping[str, Normalisation] = {}

    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes the statistics of a dataset's features in, as far as policy.normalise_* ask for them.

        Raises:
            ConfigError: a feature has no statistics, or of another size.
            DataError: the statistics lack what a mode needs.
        """
        config = self.config
        sizes = {STATE: self.env.proprio_dim // self.env.history, ACTION: self.env.action_dim}
        self.normalisation = {}
        for name, path, mode in (
            (STATE, "policy.normalise_state", config.normalise_state),
            (ACTION, "policy.normalise_actions", config.normalise_actions),
        ):
            if mode is None:
                continue
            require(name in statistics, path, mode.name, f"the data has no {name}", "use a LeRobot or RLDS dataset")
            made = Normalisation(name, mode, statistics[name])
            rule = f"the data's {name} has {made.size} dimensions, and the env's {sizes[name]}"
            require(made.size in (None, sizes[name]), path, mode.name, rule, "use data of this robot")
            self.normalisation = {**self.normalisation, name: made}

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        if name != "proprio" or STATE not in self.normalisation:  # which is normalised already
            super().set_statistics(name, mean, std)

    def network_state(self, proprio: Tensor) -> Tensor:
        """Returns what the network reads of the state vectors [B, F * D] of F env steps."""
        made = self.normalisation.get(STATE)
        return proprio if made is None else made.forward(proprio.unflatten(1, (self.env.history, -1))).flatten(1)

    def network_actions(self, actions: Tensor) -> Tensor:
        """Returns what the network is to say for actions [B, C, A]."""
        made = self.normalisation.get(ACTION)
        return actions if made is None else made.forward(actions)

    def robot_actions(self, said: Tensor) -> Tensor:
        """Returns the actions [B, C, A] of what the network says."""
        made = self.normalisation.get(ACTION)
        return said if made is None else made.inverse(said)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.normalisation:
            _write(folder, self.normalisation, self.env)

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> InDataUnits:
        policy = super().from_folder(folder, env, config)
        if policy.config.normalise_state or policy.config.normalise_actions:
            policy.normalisation = _read(folder)
        return policy


def _write(folder: Path, normalisation: Mapping[str, Normalisation], env: EnvSpec) -> None:
    made = normalisation.values()
    norm_map = {_KINDS[name]: NormMode.identity.value for name in _KINDS}
    norm_map |= {_KINDS[part.name]: part.mode.value for part in made} | {"VISUAL": NormMode.identity.value}
    shapes = {STATE: [env.proprio_dim // env.history], ACTION: [env.action_dim]}
    statistics = {f"{part.name}.{kind}": tensor for part in made for kind, tensor in part.statistics.items()}
    for name, step, features in ((PRE, NORMALISE, (STATE, ACTION)), (POST, UNNORMALISE, (ACTION,))):
        described = {feature: {"type": _KINDS[feature], "shape": shapes[feature]} for feature in features}
        settings = {"eps": 1e-8, "features": described, "norm_map": norm_map}
        write_steps(folder, name, [(step, settings)], statistics)


def _read(folder: Path) -> dict[str, Normalisation]:
    try:
        step = read_steps(folder, PRE, {NORMALISE})[NORMALISE]
        found = [read_normalisation(folder, step, name, kind) for name, kind in _KINDS.items()]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(
            f"{folder}: {PRE}.json cannot be used ({error!r}): give another checkpoint folder"
        ) from error
    return {part.name: part for part in found if part.statistics}
