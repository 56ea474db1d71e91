"""A policy behind any server of openpi's or vla-eval's websocket protocol (docs/serving.md).

A server of this project receives all rows of a call at once, with the noise: its actions equal those of the same
checkpoint in this process.  Other servers receive one request per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.acting import ActingPolicy
from rlinf_embodied.config import PolicyConfig, RemoteConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Distribution, Features, Noise, PolicyOutput, PolicySpec
from rlinf_embodied.interfaces.serving import IMAGES, OURS, PRIVILEGED, PROMPT, STATE, PolicyClient


class RemotePolicy(ActingPolicy):
    """Features: "prompt", "observation.state", "observation.images.<camera>", "observation.privileged"."""

    options_type = RemoteConfig

    def __init__(self, config: PolicyConfig, env: EnvSpec | None = None, seed: int = 0) -> None:
        """Connects to the server of policy.options.

        Raises:
            ConfigError: no policy server answers.
        """
        self._options = options = typed(config.options, RemoteConfig, "policy.options")
        assert options.url is not None
        self.source, self._chunk, self.module = f"remote.url is {options.url!r}", options.chunk, nn.Module()
        self._client = PolicyClient(options.url, options.timeout_s)
        unknown = PolicySpec(config.name, options.chunk, 1, 1, Noise((options.chunk, 1)))
        self.spec = unknown if self._client.ours is None else _spec(self._client.ours["spec"])

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> RemotePolicy:
        """Returns the policy of a server; `folder` is ignored."""
        assert config is not None
        return cls(config)

    def encode(self, observation: Observation) -> Features:
        """Returns the content of a request; texts are UTF-8, uint8 [B, L], padded with zeros."""
        texts = np.array([text.encode() + b" " for text in observation.instruction])
        features = {PROMPT: torch.from_numpy(texts.view(np.uint8).reshape(len(texts), -1).copy())}
        features |= {f"{IMAGES}{name}": value for name, value in observation.images.items()}
        features |= {STATE: observation.proprio} if observation.state else {}
        return features if observation.privileged is None else features | {PRIVILEGED: observation.privileged}

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Returns the server's actions; log-probs, which are not used, are 0.

        Raises:
            ServerError: the connection failed, the server rejected an observation, or returned too few actions.
        """
        arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in features.items()}
        arrays[PROMPT] = [bytes(row).rstrip(b"\0")[:-1].decode() for row in arrays[PROMPT]]
        names = {ours: theirs for theirs, ours in self._options.keys.items()}
        if unknown := set(names) - set(arrays):
            raise ConfigError(
                f"remote.keys names {min(unknown)!r}, but the env shows {', '.join(arrays)}: use one of them"
            )
        request, rows = {names.get(name, name): value for name, value in arrays.items()}, len(arrays[PROMPT])
        if self._client.ours is not None:
            drawn = None if noise is None else noise.cpu().numpy()
            call = {"rows": rows, "noise": drawn, "temperature": temperature}
            chunks = self._client.infer({**request, OURS: call}, self._chunk)
        else:
            requests = [{name: value[row] for name, value in request.items()} for row in range(rows)]
            chunks = np.stack([self._client.infer(single, self._chunk) for single in requests])
        actions = torch.from_numpy(chunks)
        return PolicyOutput(actions, {"actions": actions}, torch.zeros(*actions.shape[:2], 1))


def _spec(given: Mapping[str, Any]) -> PolicySpec:
    noise = {
        name: Noise(tuple(given[name]["shape"]), Distribution(given[name]["distribution"]))
        for name in ("noise", "greedy_noise")
        if given[name] is not None
    }
    return PolicySpec(**{**given, **noise})
