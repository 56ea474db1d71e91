"""The processor files of a LeRobot folder: policy_preprocessor.json, policy_postprocessor.json and their statistics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from policies.checkpoint_folder import read_json, read_tensors, write_json
from rlinf_embodied.config import NormMode
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.errors import CheckpointError, DataError

PRE, POST = "policy_preprocessor", "policy_postprocessor"
KINDS = {STATE: "STATE", ACTION: "ACTION"}  # of features
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


def read_normalisation(folder: Path, step: Mapping[str, Any], feature: str) -> Normalisation:
    """Returns the normalisation of state or action in a normaliser's step.

    Raises:
        CheckpointError: its statistics are missing or damaged.
        DataError: the statistics lack what the mode needs.
    """
    file, prefix = step["state_file"], f"{feature}."
    tensors = read_tensors(folder / file) if file else {}
    statistics = {name.removeprefix(prefix): t.float() for name, t in tensors.items() if name.startswith(prefix)}
    return Normalisation(feature, NormMode(step["norm_map"].get(KINDS[feature], "IDENTITY")), statistics, step["eps"])


def write_steps(folder: Path, name: str, steps: Sequence[Step], parts: Collection[Normalisation]) -> None:
    """Writes PRE or POST, with the statistics of `parts`."""
    statistics = {f"{part.name}.{kind}": each.contiguous() for part in parts for kind, each in part.statistics.items()}
    listed: list[dict[str, Any]] = []
    for number, (step, settings) in enumerate(steps):
        listed.append({"registry_name": step, "config": settings})
        if step in (NORMALISE, UNNORMALISE):
            listed[-1]["state_file"] = f"{name}_step_{number}_{step}.safetensors"
            save_file(statistics, folder / listed[-1]["state_file"])
    write_json(folder / f"{name}.json", {"name": name, "steps": listed})


def write_normalisers(folder: Path, parts: Mapping[str, Normalisation], sizes: Mapping[str, int]) -> None:
    """Writes both files with one step, by feature; `sizes` are those of state and action."""
    modes = {KINDS[name]: parts[name].mode if name in parts else NormMode.identity for name in KINDS}
    norm_map = {kind: mode.value for kind, mode in modes.items()} | {"VISUAL": NormMode.identity.value}
    for name, step, features in ((PRE, NORMALISE, (STATE, ACTION)), (POST, UNNORMALISE, (ACTION,))):
        described = {feature: {"type": KINDS[feature], "shape": [sizes[feature]]} for feature in features}
        settings = {"eps": 1e-8, "features": described, "norm_map": norm_map}
        write_steps(folder, name, [(step, settings)], parts.values())


def read_normalisers(folder: Path, modes: Mapping[str, NormMode | None]) -> dict[str, Normalisation]:
    """Returns what `write_normalisers` wrote, by feature; `modes` are those of config.json.

    Raises:
        CheckpointError: a file is missing or damaged, or the modes differ.
    """
    try:
        step = read_steps(folder, PRE, {NORMALISE})[NORMALISE]
        parts = [read_normalisation(folder, step, name) for name in KINDS]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(
            f"{folder}: {PRE}.json cannot be used ({error!r}): give another checkpoint folder"
        ) from error
    for part in parts:
        mode = modes[part.name] or NormMode.identity
        if part.mode is not mode or (part.size is None) is not (mode is NormMode.identity):
            has = f"{part.mode.name} and {'statistics' if part.statistics else 'no statistics'}"
            raise CheckpointError(
                f"{folder}: {PRE}.json has {has} for {part.name}, but config.json has {mode.name}: "
                "copy the folder again, or give another checkpoint"
            )
    return {part.name: part for part in parts if part.statistics}
