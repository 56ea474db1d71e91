"""Finds, before any rollout, in which conventions a policy and demonstrations differ: what is flipped, swapped, scaled.

python experiments/check_conventions.py checkpoint=runs/demo/checkpoints/latest data=runs/pick
python experiments/check_conventions.py checkpoint=<published folder> policy=pi0 data=runs/pick

The policy predicts demonstrated chunks from recorded observations, once as they are and once per known fault with that
fault undone.  A fault is reported if undoing it lowers the error by at least `min_gain` and four standard errors.  It
then stays undone and the search is repeated, so that several faults are found.  Only a policy that predicts the
demonstrations well can be checked, and only what its actions depend on.

    images    upside down, mirrored, turned by 90 or 180 degrees, BGR, not cropped, of one or all cameras; swapped
    state     degrees or radians, entries swapped, quaternions with their real part first or last
    actions   signs, entries swapped, gripper in [0, 1] or inverted, degrees or radians, Euler angles or rotation
              vectors, in the frame of the tool, absolute or relative to the state, another frame rate, a step early
              or late, other statistics

Exit code 0: nothing found; 1: a fault was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from policies.checkpoint_folder import read_json
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose, compose_train
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.data.conversions import ROTATIONS
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset
from rlinf_embodied.embodied.demonstrations import RecordedChunks
from rlinf_embodied.embodied.policy_folder import load_policy, trained_under
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation, features_of
from rlinf_embodied.interfaces.policies import Policy

_STANDARD_ERRORS = 4.0
_MAX_FAULTS = 4
_ALIKE = 1.2  # factor of errors up to which two explanations are alike
_BELIEVED = 1.5  # factor up to which an explanation without fitted numbers is believed before one with them
_SMALLEST_SPREAD = 1e-3  # of an action's entry, by which its error is divided
_CROP = 0.9  # share of an image's area
_FRAME_CACHE_BYTES = 1e9
_FORMS = {  # of rotations, by what people call them
    "Euler angles": "euler_xyz",
    "rotation vectors": "rotation_vector",
    "xyzw": "quaternion_xyzw",
    "wxyz": "quaternion_wxyz",
}

Predict = Callable[[Observation], Tensor]  # actions float32 [M, C, A] in the units of the demonstrations


@dataclass(kw_only=True, slots=True)
class ConventionsConfig:
    """Everything that experiments/check_conventions.py reads; env and policy are the checkpoint's."""

    checkpoint: str  # of a run, or with policy=<preset> a folder that others published
    data: str  # a folder of LeRobot or RLDS
    policy: PolicyConfig | None = None  # of a published folder
    cameras: list[str] = field(default_factory=list)  # of the data, that a published policy sees; []: all
    chunk: int = 0  # of a published folder whose config.json has no chunk_size (OpenVLA-OFT); 0: chunk_size, or else 1
    num_frames: int = 200  # evenly spread over the dataset
    min_gain: float = 0.15  # least share of the error that disappears

    def __post_init__(self) -> None:
        require_numbers(self, "", "num_frames", low=20)
        require_numbers(self, "", "min_gain", above=True, high=1)


@dataclass(frozen=True, slots=True)
class Undo:
    """How a fault is undone: in what the policy sees, and in what its actions are compared with."""

    name: str  # what the fault is, for example "images of wrist are mirrored"
    seen: Callable[[Observation], Observation] | None = None
    predicted: Callable[[Tensor, Demonstrations], Tensor] = lambda actions, _: actions  # NaN: do not compare
    fits: bool = False  # whether its numbers are fitted to the demonstrations: others that help are believed first


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was found; errors are means in standard deviations of the action."""

    name: str
    error: float
    error_undone: float
    alternatives: tuple[str, ...] = ()  # faults that explain these demonstrations as well


def find_faults(predict: Predict, demos: Demonstrations, min_gain: float = 0.15) -> list[Fault]:
    """Returns the faults in the demonstrations, as the policy that predicts sees them, in the order of their effect."""
    found: list[Fault] = []
    undone: list[Undo] = []
    observation = demos.observation
    for _ in range(_MAX_FAULTS):
        raw = predict(observation)
        base = _undone(raw, demos, undone)
        helpful: list[tuple[Fault, Undo]] = []
        for undo in _candidates(demos):
            if undo.name in {other.name for other in undone}:
                continue
            actions = raw if undo.seen is None else predict(undo.seen(observation))
            errors, before = _compared(_undone(actions, demos, [*undone, undo]), base, demos)
            difference, mean = before - errors, float(before.mean())
            sure = float(difference.mean()) > _STANDARD_ERRORS * float(difference.std()) / math.sqrt(len(difference))
            if sure and float(difference.mean()) >= min_gain * mean:
                helpful.append((Fault(undo.name, mean, float(errors.mean())), undo))
        if not helpful:
            break
        share = lambda pair: pair[0].error_undone / pair[0].error  # noqa: E731
        least = share(min(helpful, key=share))
        fault, undo = min(helpful, key=lambda pair: (pair[1].fits or share(pair) > _BELIEVED * least, share(pair)))
        alike = [f.name for f, _ in helpful if f is not fault and f.error_undone <= _ALIKE * fault.error_undone]
        found.append(replace(fault, alternatives=tuple(alike)))
        undone.append(undo)
        observation = observation if undo.seen is None else undo.seen(observation)
    return found


def _undone(actions: Tensor, demos: Demonstrations, undone: Sequence[Undo]) -> Tensor:
    for undo in undone:
        actions = undo.predicted(actions, demos)
    return actions


def _compared(actions: Tensor, base: Tensor, demos: Demonstrations) -> tuple[Tensor, Tensor]:
    """Returns the errors of two predictions, float64 [M] each, of the entries that both have."""
    wanted, present = demos.actions.double(), torch.isfinite(actions) & torch.isfinite(base)
    if demos.is_pad is not None:
        present &= ~demos.is_pad[..., None]
    spread = wanted.flatten(0, 1).std(0).clamp(min=_SMALLEST_SPREAD)
    count = present.sum((1, 2))
    rows = count > 0
    errors = [((a.double() - wanted).abs() / spread).where(present, 0.0).sum((1, 2)) / count for a in (actions, base)]
    return errors[0][rows], errors[1][rows]


# ---------------------------------------------------------------------------------------------------------- candidates
def _candidates(demos: Demonstrations) -> Iterator[Undo]:
    yield from _of_images(list(demos.observation.images))
    yield from _of_state(demos.observation.proprio.shape[1])
    yield from _of_actions(demos)


def _of_images(cameras: list[str]) -> Iterator[Undo]:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "upside down": lambda x: x.flip(-3),
        "mirrored": lambda x: x.flip(-2),
        "rotated by 180 degrees": lambda x: x.flip(-3, -2),
        "rotated by 90 degrees to the left": lambda x: x.rot90(-1, (-3, -2)) if x.shape[-3] == x.shape[-2] else x,
        "rotated by 90 degrees to the right": lambda x: x.rot90(1, (-3, -2)) if x.shape[-3] == x.shape[-2] else x,
        "BGR, not RGB": lambda x: x.flip(-1),
        f"not cropped to {_CROP} of their area": _cropped,
    }
    groups = [[camera] for camera in cameras] + ([cameras] if len(cameras) > 1 else [])
    for group, (name, way) in itertools.product(groups, ways.items()):
        yield Undo(f"images of {', '.join(group)} are {name}", _on_images(group, way))
    for first, second in itertools.combinations(cameras, 2):
        yield Undo(f"cameras {first} and {second} are swapped", _with_swapped(first, second))


def _on_images(cameras: list[str], way: Callable[[Tensor], Tensor]) -> Callable[[Observation], Observation]:
    return lambda seen: replace(seen, images={n: way(x) if n in cameras else x for n, x in seen.images.items()})


def _with_swapped(first: str, second: str) -> Callable[[Observation], Observation]:
    other = {first: second, second: first}
    return lambda seen: replace(seen, images={name: seen.images[other.get(name, name)] for name in seen.images})


def _cropped(images: Tensor) -> Tensor:
    height, width = images.shape[-3:-1]
    top, left = (round(side * (1 - math.sqrt(_CROP)) / 2) for side in (height, width))
    kept = images[..., top : height - top, left : width - left, :].flatten(0, -4).movedim(-1, -3).float()
    grown = F.interpolate(kept, (height, width), mode="bilinear", align_corners=False)
    return grown.round().to(torch.uint8).movedim(-3, -1).reshape(images.shape)


def _of_state(dim: int) -> Iterator[Undo]:
    entries = list(range(dim))
    yield Undo("the state is in degrees, not radians", lambda seen: seen.with_proprio(seen.proprio * (math.pi / 180)))
    yield Undo("the state is in radians, not degrees", lambda seen: seen.with_proprio(seen.proprio * (180 / math.pi)))
    for i, j in itertools.combinations(entries, 2):
        yield Undo(f"entries {i} and {j} of the state are swapped", _reordered(_swapped(dim, i, j)))
    for i in range(dim - 3):
        before, four, after = entries[:i], entries[i : i + 4], entries[i + 4 :]
        for shift, name in ((1, "last"), (-1, "first")):
            order = before + four[-shift:] + four[:-shift] + after
            yield Undo(f"the quaternion at {i} of the state has its real part {name}", _reordered(order))


def _swapped(dim: int, i: int, j: int) -> list[int]:
    return [{i: j, j: i}.get(k, k) for k in range(dim)]


def _reordered(order: list[int]) -> Callable[[Observation], Observation]:
    return lambda seen: seen.with_proprio(seen.proprio[:, order])


def _of_actions(demos: Demonstrations) -> Iterator[Undo]:
    dim, last = demos.actions.shape[-1], demos.actions.shape[-1] - 1
    for i in range(dim):
        sign = torch.ones(dim)
        sign[i] = -1.0
        named = f"entry {i} of the actions" + (" (a gripper's place)" if i == last else "")
        yield Undo(f"{named} has the other sign", predicted=lambda actions, _, sign=sign: actions * sign)
    for i, j in itertools.combinations(range(dim), 2):
        order = _swapped(dim, i, j)
        yield Undo(f"entries {i} and {j} of the actions are swapped", predicted=lambda a, _, order=order: a[..., order])
    names = f"entry {last} of the actions (a gripper's place) lies in"
    yield Undo(f"{names} [0, 1], not [-1, 1]", predicted=lambda a, _: _with_last(a, (a[..., -1:] + 1) / 2))
    yield Undo(f"{names} [-1, 1], not [0, 1]", predicted=lambda a, _: _with_last(a, a[..., -1:] * 2 - 1))
    yield Undo(f"{names} [0, 1], and the other end is open", predicted=lambda a, _: _with_last(a, 1 - a[..., -1:]))
    yield Undo("the actions are in degrees, not radians", predicted=lambda a, _: a * (180 / math.pi))
    yield Undo("the actions are in radians, not degrees", predicted=lambda a, _: a * (math.pi / 180))
    yield Undo("the actions have another scale (normaliser, units or frame rate)", predicted=_scaled, fits=True)
    yield Undo("the actions have another scale and offset in each entry (statistics)", predicted=_refitted, fits=True)
    yield from _of_rotations(demos)
    for kind, sums in (("absolute", False), ("relative", True)) if demos.actions.shape[1] > 1 else ():
        for name, way in (("twice", _slower), ("half", _faster)):
            yield Undo(
                f"the data has {name} the frame rate that the policy learned ({kind} actions)",
                predicted=lambda a, _, way=way, sums=sums: way(a, sums),
            )
    if demos.observation.proprio.shape[1] >= dim:
        for sign, name in ((1.0, "absolute, not relative to"), (-1.0, "relative, not absolute, to")):
            yield Undo(f"the actions are {name} the state", predicted=lambda a, d, sign=sign: a + sign * _offset(a, d))
    if demos.actions.shape[1] > 1:
        missing = torch.full_like(demos.actions[:, :1], torch.nan)
        early = lambda actions, _: torch.cat([actions[:, 1:], missing], 1)  # noqa: E731
        late = lambda actions, _: torch.cat([missing, actions[:, :-1]], 1)  # noqa: E731
        yield Undo("the actions begin one step early", predicted=late)
        yield Undo("the actions begin one step late", predicted=early)


def _of_rotations(demos: Demonstrations) -> Iterator[Undo]:
    """Yields faults of actions that are a translation and a rotation, in their first six entries."""
    state, dim = demos.observation.proprio, demos.actions.shape[-1]
    if dim not in (6, 7):
        return
    for here, there in itertools.permutations(("Euler angles", "rotation vectors")):
        yield Undo(f"the rotations of the actions are {here}, not {there}", predicted=_turned(there, here))
    for form, kind in _FORMS.items():
        size, rotation, _ = ROTATIONS[kind]
        if state.shape[1] >= 3 + size and (size == 3 or bool((state[:, 3:7].norm(dim=1) - 1).abs().max() < 1e-2)):
            pose = torch.from_numpy(rotation(state[:, 3 : 3 + size].numpy()).as_matrix()).float()[:, None, None]
            for name, turn in (("tool, not the base", pose.mT), ("base, not the tool", pose)):
                yield Undo(
                    f"the actions are in the frame of the {name} (orientation at 3 of the state: {form})",
                    predicted=lambda a, _, turn=turn: _in_frame(a, turn),
                )


def _turned(here: str, there: str) -> Callable[[Tensor, Demonstrations], Tensor]:
    rotation, written = ROTATIONS[_FORMS[here]][1], ROTATIONS[_FORMS[there]][2]

    def changed(actions: Tensor, _: Demonstrations) -> Tensor:
        turns = torch.from_numpy(written(rotation(actions[..., 3:6].nan_to_num().reshape(-1, 3).numpy()))).float()
        return torch.cat([actions[..., :3], turns.reshape(*actions.shape[:-1], 3), actions[..., 6:]], -1)

    return changed


def _in_frame(actions: Tensor, turn: Tensor) -> Tensor:
    """Returns actions [M, C, A] whose translations and (small) rotations are turned by matrices [M, 1, 1, 3, 3]."""
    parts = actions[..., :6].unflatten(-1, (2, 3))
    return torch.cat([(turn @ parts[..., None])[..., 0].flatten(-2), actions[..., 6:]], -1)


def _slower(actions: Tensor, sums: bool) -> Tensor:
    """Returns a chunk with two steps in place of each."""
    steps = actions.repeat_interleave(2, 1)[:, : actions.shape[1]]
    return steps / 2 if sums else steps


def _faster(actions: Tensor, sums: bool) -> Tensor:
    """Returns a chunk with a step in place of two."""
    half = actions.shape[1] // 2
    pairs = actions[:, : 2 * half].unflatten(1, (half, 2))
    steps = pairs.sum(2) if sums else pairs[:, :, 1]
    return torch.cat([steps, torch.full_like(actions[:, half:], torch.nan)], 1)


def _refitted(actions: Tensor, demos: Demonstrations) -> Tensor:
    """Returns the predictions that are nearest with a positive scale, and an offset, in each entry."""
    given, wanted = actions.nan_to_num().flatten(0, 1).double(), demos.actions.flatten(0, 1).double()
    centred = given - given.mean(0)
    slope = (centred * (wanted - wanted.mean(0))).mean(0) / centred.square().mean(0).clamp(min=1e-12)
    slope = torch.where(slope > 0, slope, 1.0)
    return (actions - given.mean(0)).mul(slope).add(wanted.mean(0)).float()


def _with_last(actions: Tensor, last: Tensor) -> Tensor:
    return torch.cat([actions[..., :-1], last], -1)


def _offset(actions: Tensor, demos: Demonstrations) -> Tensor:
    return demos.observation.proprio[:, None, : actions.shape[-1]]


def _scaled(actions: Tensor, demos: Demonstrations) -> Tensor:
    """Returns predictions times the factor that brings them nearest to the demonstrated actions."""
    given = actions.nan_to_num()
    return actions * ((given * demos.actions).sum() / (given * given).sum().clamp(min=1e-12))


# ------------------------------------------------------------------------------------------------------------- command
def read_demonstrations(config: ConventionsConfig) -> tuple[Predict, Demonstrations, Tensor | None]:
    """Returns the checkpoint's greedy actions as a function, chunks that begin at frames of the dataset, and noise.

    A flow's actions begin with the noise; it is None for other policies.
    """
    dataset = open_dataset(config.data, "data")
    policy = open_policy(config, dataset)
    spec = getattr(policy, "env", None)
    if not isinstance(spec, EnvSpec):
        rule = "its policy has no attribute `env`, the EnvSpec that it acts in"
        raise CheckpointError(f"checkpoint is {config.checkpoint!r}, but {rule}: set it in from_folder")
    action = "record it with the policy's cameras, state and actions, or rename its features"
    for name in spec.cameras:
        require(name in dataset.cameras, "data", config.data, f"the policy sees a camera {name!r}", action)
    for name, size, needed in (
        (ACTION, dataset.size(ACTION), spec.action_dim),
        (STATE, dataset.state.shape[1], spec.proprio_dim),
    ):
        require(size == needed, "data", config.data, f"{name} has {size} entries and the policy {needed}", action)
    frames = np.unique(np.linspace(0, len(dataset) - 1, config.num_frames).astype(np.int64))
    demos = RecordedChunks(dataset, frames, spec, FrameCache(_FRAME_CACHE_BYTES)).rows(range(len(frames)))
    start, numbers = policy.spec.greedy_noise, np.arange(len(demos))  # a flow begins with noise
    noise = None if start is None else start.draw(0, "conventions", numbers)
    temperature = 1.0 if start is None else 0.0  # as an evaluation
    return lambda seen: policy.act(policy.encode(seen), noise, temperature).actions.float(), demos, noise


def open_policy(config: ConventionsConfig, dataset: RecordedDataset) -> Policy:
    """Returns the checkpoint's policy; a published one acts in what the dataset shows."""
    if config.policy is None:
        return load_policy(trained_under(config.checkpoint).policy, config.checkpoint, "cpu").policy
    section = replace(config.policy, critic=Critic.observation)
    return load_policy(section, config.checkpoint, "cpu", _spec_of(dataset, config)).policy


def _spec_of(dataset: RecordedDataset, config: ConventionsConfig) -> EnvSpec:
    """Returns what a published policy is taken to act in: the robot of the dataset."""
    described = read_json(Path(config.checkpoint) / "config.json", "give a published folder")
    chunk = config.chunk or int(described.get("chunk_size", 1))
    cameras = config.cameras or list(dataset.cameras)
    known = set(cameras) <= set(dataset.cameras)
    require(known, "cameras", cameras, f"the data has {', '.join(dataset.cameras)}", "use some of these")
    images = {name: dataset.image_size(name) for name in cameras}
    features = features_of(images, {"proprio": sum(dataset.states.values())})
    return EnvSpec(str(config.data), 1, chunk, chunk, dataset.size(ACTION) or 0, features, "recorded")


def compose_check(words: Sequence[str]) -> ConventionsConfig:
    """Returns the config of the command's words; those of the policy are as in a training."""
    of_policy = [word for word in words if word.startswith(("policy=", "policy."))]
    config = compose(ConventionsConfig, [word for word in words if word not in of_policy])
    if of_policy:
        config.policy = compose_train(of_policy).policy
    return config


def check(config: ConventionsConfig) -> int:
    predict, demos, _ = read_demonstrations(config)
    with torch.no_grad():
        faults = find_faults(predict, demos, config.min_gain)
        wanted = predict(demos.observation)
    error = float(_compared(wanted, wanted, demos)[0].mean())
    print(f"{len(demos)} frames; mean error of an action {error:.3f} of its standard deviation")
    for fault in faults:
        print(f"found: {fault.name}: undone, the error falls from {fault.error:.3f} to {fault.error_undone:.3f}")
        for name in fault.alternatives:
            print(f"   or: {name}")
    print(f"{len(faults)} faults found" if faults else "no fault found")
    return 1 if faults else 0


if __name__ == "__main__":
    main(check, ConventionsConfig, compose_check)
