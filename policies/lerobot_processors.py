"""The processor files of a LeRobot folder: policy_preprocessor.json, policy_postprocessor.json and their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from policies.checkpoint_folder import read_json, read_tensors, write_json
from rlinf_embodied.config import NormMode
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.errors import CheckpointError

PRE, POST = "policy_preprocessor", "policy_postprocessor"
Step = tuple[str, Mapping[str, Any]]  # (name in LeRobot's registry, settings)
NORMALISE, UNNORMALISE = "normalizer_processor", "unnormalizer_processor"  # the steps with statistics


def read_steps(folder: Path, name: str, known: set[str]) -> dict[str, dict[str, Any]]:
    """Returns the settings of PRE's or POST's steps by registry name, each with its "state_file" (or None).

    Raises:
        CheckpointError: the file is missing or damaged, or has a step that is not `known`.
    """
    path, action = folder / f"{name}.json", "give a complete folder in LeRobot's layout"
    try:
        steps = read_json(path, action)["steps"]
        settings = {each["registry_name"]: {**each["config"], "state_file": each.get("state_file")} for each in steps}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} lists no steps of processors ({error!r}): {action}") from error
    if unknown := sorted(settings.keys() - known):
        raise CheckpointError(f"{path} has the steps {unknown}, which are not supported: {action}")
    return settings


def read_normalisation(folder: Path, step: Mapping[str, Any], feature: str, kind: str) -> Normalisation:
    """Returns the normalisation of a feature, of a kind such as "STATE", in a normaliser's step.

    Raises:
        CheckpointError: its statistics are missing or damaged.
        DataError: the statistics lack what the mode needs.
    """
    file, prefix = step["state_file"], f"{feature}."
    tensors = read_tensors(folder / file) if file else {}
    statistics = {name.removeprefix(prefix): t.float() for name, t in tensors.items() if name.startswith(prefix)}
    return Normalisation(feature, NormMode(step["norm_map"].get(kind, "IDENTITY")), statistics, step["eps"])


def write_steps(folder: Path, name: str, steps: Sequence[Step], statistics: Mapping[str, Tensor]) -> None:
    """Writes PRE or POST; `statistics` are float32 by "<feature>.<kind>"."""
    listed: list[dict[str, Any]] = []
    for number, (step, settings) in enumerate(steps):
        listed.append({"registry_name": step, "config": settings})
        if step in (NORMALISE, UNNORMALISE):
            listed[-1]["state_file"] = f"{name}_step_{number}_{step}.safetensors"
            save_file({key: value.contiguous() for key, value in statistics.items()}, folder / listed[-1]["state_file"])
    write_json(folder / f"{name}.json", {"name": name, "steps": listed})
