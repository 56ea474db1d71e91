"""Finds, before any rollout, in which conventions a policy and demonstrations differ: what is flipped, swapped, scaled.

python experiments/check_conventions.py checkpoint=runs/demo/checkpoints/latest data=runs/pick
python experiments/check_conventions.py checkpoint=<published folder> policy=pi0 data=runs/pick
python experiments/check_conventions.py checkpoint=runs/sft/checkpoints/latest env=maniskill_pick

The policy predicts demonstrated chunks from recorded observations, once as they are and once per known fault with that
fault undone.  Demonstrations are those of `data`, of the scripted expert in `env`, or both.  A fault is reported if
undoing it lowers the errors of the entries that change by at least `min_gain`, and the mean error of a frame by four
standard errors.  It then stays undone and the search is repeated, so that several faults are found.  Only a policy
that predicts the demonstrations well can be checked, and only what its actions depend on.

    images    upside down, mirrored, turned by 90 or 180 degrees, BGR, cropped or not, of one or all cameras; swapped
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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from policies.checkpoint_folder import read_json
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose, compose_export, compose_train
from rlinf_embodied.config import Critic, EnvConfig, ExportConfig, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.data.conversions import ROTATIONS
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset
from rlinf_embodied.embodied.demonstrations import RecordedChunks
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.policy_folder import CONDITIONS, load_policy, trained_under
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation, features_of
from rlinf_embodied.interfaces.policies import Policy

_STANDARD_ERRORS = 4.0
_MAX_FAULTS = 4
_SURE_GAIN = 0.15  # least gain of fitted explanations, and of further faults: undoing the first may leave some of it
_SCREENED = 32  # number of frames on which every candidate is tried
_BELIEVED = 1.5  # factor of errors up to which an explanation with fewer fitted numbers is believed first
_SMALLEST_SPREAD = 1e-3  # of an action's entry, by which its error is divided
_CROP = 0.9  # share of an image's area
_GRIPPER = 6  # the entry of an action that a pose of 6 leaves to a gripper
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
    data: str = ""  # a folder of LeRobot or RLDS; "": episodes of the scripted expert in env
    env: EnvConfig | None = None  # given with data: the expert's episodes are checked, too; the checkpoint's by default
    num_episodes: int = 25  # of the expert
    policy: PolicyConfig | None = None  # of a published folder
    cameras: list[str] = field(default_factory=list)  # of the data, that a published policy sees; []: all
    chunk: int = 0  # of a published folder whose config.json has no chunk_size (OpenVLA-OFT); 0: chunk_size, or else 1
    num_frames: int = 250  # evenly spread over the dataset
    min_gain: float = 0.01  # least share of the error that disappears; clean data: up to 0.004 (docs/datasets.md)

    def __post_init__(self) -> None:
        require_numbers(self, "", "num_frames", low=20)
        require_numbers(self, "", "num_episodes", low=1)
        require_numbers(self, "", "min_gain", above=True, high=1)


@dataclass(frozen=True, slots=True)
class Undo:
    """How a fault is undone: in what the policy sees, and in what its actions are compared with."""

    name: str  # what the fault is, for example "images of wrist are mirrored"
    seen: Callable[[Observation], Observation] | None = None
    predicted: Callable[[Tensor, Demonstrations], Tensor] = lambda actions, _: actions  # NaN: do not compare
    fitted: int = 0  # rank by how much is fitted to the demonstrations; the fewer, the sooner it is believed


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was found; errors are means in standard deviations of the action."""

    name: str
    error: float
    error_undone: float
    alternatives: tuple[str, ...] = ()  # faults that explain these demonstrations as well


def find_faults(predict: Predict, demos: Demonstrations, min_gain: float = 0.01) -> list[Fault]:
    """Returns the faults in the demonstrations, as the policy that predicts sees them, in the order of their effect."""
    found: list[Fault] = []
    undone: list[Undo] = []
    while len(found) < _MAX_FAULTS:
        names = {undo.name for undo in undone}
        undos = [undo for undo in _candidates(demos) if undo.name not in names]
        few = demos.rows(range(0, len(demos), max(1, len(demos) // _SCREENED)))  # most make errors larger on these
        before, errors = _errors_without(predict, few, undone, undos)
        undos = [undo for undo, after in zip(undos, errors, strict=True) if _fall(before, after).mean > 0]
        before, errors = _errors_without(predict, demos, undone, undos)
        falls = [_fall(before, after) for after in errors]
        helpful = [
            (fall.left, undo, after)
            for fall, undo, after in zip(falls, undos, errors, strict=True)
            if fall.mean > _STANDARD_ERRORS * fall.standard_error
            and fall.share >= (max(min_gain, _SURE_GAIN) if found or undo.fitted else min_gain)
        ]
        if not helpful:
            break
        least = min(left for left, *_ in helpful)
        left, best, after = min(helpful, key=lambda each: (each[0] > _BELIEVED * least, each[1].fitted, each[0]))
        others = [each for each in helpful if each[1] is not best and each[1].fitted <= best.fitted]
        versus = [(undo.name, _fall(other, after)) for _, undo, other in others]
        alike = [name for name, fall in versus if fall.mean <= _STANDARD_ERRORS * fall.standard_error]
        error = float(before.nanmean())
        found.append(Fault(best.name, error, error * left, tuple(alike)))
        undone.append(best)
        if best.seen is not None:
            demos = replace(demos, observation=best.seen(demos.observation))
    return found


def _errors_without(
    predict: Predict, demos: Demonstrations, undone: Sequence[Undo], undos: Sequence[Undo]
) -> tuple[Tensor, list[Tensor]]:
    """Returns errors [M, C, A] after the changes of actions by `undone`, and those with each of `undos` undone, too."""
    raw = predict(demos.observation)
    errors = []
    for undo in undos:
        actions = raw if undo.seen is None else predict(undo.seen(demos.observation))
        errors.append(errors_of(actions, demos, [*undone, undo]))
    return errors_of(raw, demos, undone), errors


def errors_of(actions: Tensor, demos: Demonstrations, undone: Sequence[Undo] = ()) -> Tensor:
    """Returns |predicted - demonstrated| in standard deviations of an entry, float64 [M, C, A]; NaN: not compared."""
    for undo in undone:
        actions = undo.predicted(actions, demos)
    wanted = demos.actions.double()
    errors = (actions.double() - wanted).abs() / wanted.flatten(0, 1).std(0).clamp(min=_SMALLEST_SPREAD)
    return errors if demos.is_pad is None else errors.masked_fill(demos.is_pad[..., None], torch.nan)


class Fall(NamedTuple):
    """By how much errors fall, over the entries in which both are compared."""

    mean: float  # over frames
    standard_error: float
    share: float  # of the errors before, in entries that change
    left: float  # share of the errors in all entries that stays


def _fall(before: Tensor, after: Tensor) -> Fall:
    fall = before - after
    frames, changed = fall.nanmean((1, 2)), fall.abs() > 1e-6
    frames, total = frames[frames.isfinite()], before[fall.isfinite()].sum().clamp(min=1e-12)
    share = fall[changed].sum() / before[changed].sum().clamp(min=1e-12)
    error = frames.std() / math.sqrt(max(1, len(frames)))
    return Fall(float(frames.mean()), float(error), float(share), 1 - float(fall.nansum() / total))


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
        f"not cropped to {_CROP} of their area": lambda x: _zoomed(x, _CROP),
        f"cropped to {_CROP} of their area": lambda x: _zoomed(x, 1 / _CROP),
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


def _zoomed(images: Tensor, area: float) -> Tensor:
    """Returns the central share `area` of images [..., H, W, 3]; above 1 they shrink, and their edges are repeated."""
    height, width = images.shape[-3:-1]
    side = math.sqrt(area)
    rows, columns = ((torch.arange(n) + 0.5 - n / 2) * side / (n / 2) for n in (height, width))
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)
    zoomed = []
    for pixels in images.flatten(0, -4).movedim(-1, -3).split(64):
        sampled = F.grid_sample(pixels.float(), grid.expand(len(pixels), -1, -1, -1), "bilinear", "border", False)
        zoomed.append(sampled.round().to(torch.uint8))
    return torch.cat(zoomed).movedim(-3, -1).reshape(images.shape)


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
    yield Undo("the actions have another scale (normaliser, units or frame rate)", predicted=_scaled, fitted=1)
    yield Undo("the actions have another scale and offset in each entry (statistics)", predicted=_refitted, fitted=2)
    yield from _of_rotations(demos)
    for kind, sums in (("absolute", False), ("relative", True)) if demos.actions.shape[1] > 1 else ():
        for name, way in (("twice", _slower), ("half", _faster)):
            yield Undo(
                f"the data has {name} the frame rate that the policy learned ({kind} actions)",
                predicted=lambda a, _, way=way, sums=sums: way(a, sums),
            )
    if demos.observation.proprio.shape[1] >= dim:
        for sign, name in ((1.0, "absolute, not relative to"), (-1.0, "relative, not absolute, to")):
            yield Undo(f"the actions are {name} the state", predicted=lambda a, d, sign=sign: _moved(a, d, sign))
    if demos.actions.shape[1] > 1:
        none = lambda a: torch.full_like(a[:, :1], torch.nan)  # noqa: E731
        yield Undo("the actions begin one step early", predicted=lambda a, _: torch.cat([none(a), a[:, :-1]], 1))
        yield Undo("the actions begin one step late", predicted=lambda a, _: torch.cat([a[:, 1:], none(a)], 1))


def _of_rotations(demos: Demonstrations) -> Iterator[Undo]:
    """Yields faults of actions that are a translation and a rotation, in their first six entries."""
    state, dim = demos.observation.proprio, demos.actions.shape[-1]
    if dim not in (6, 7):
        return
    for here, there in itertools.permutations(("Euler angles", "rotation vectors")):
        yield Undo(f"the rotations of the actions are {here}, not {there}", predicted=_turned(there, here))
    for form, kind in _FORMS.items():
        size = ROTATIONS[kind][0]
        if state.shape[1] >= 3 + size and (size == 3 or bool((state[:, 3:7].norm(dim=1) - 1).abs().max() < 1e-2)):
            for name, inverse in (("tool, not the base", True), ("base, not the tool", False)):
                yield Undo(
                    f"the actions are in the frame of the {name} (orientation at 3 of the state: {form})",
                    predicted=lambda a, d, kind=kind, inverse=inverse: _in_frame(a, d, kind, inverse),
                )


def _turned(here: str, there: str) -> Callable[[Tensor, Demonstrations], Tensor]:
    rotation, written = ROTATIONS[_FORMS[here]][1], ROTATIONS[_FORMS[there]][2]

    def changed(actions: Tensor, _: Demonstrations) -> Tensor:
        turns = torch.from_numpy(written(rotation(actions[..., 3:6].nan_to_num().reshape(-1, 3).numpy()))).float()
        return torch.cat([actions[..., :3], turns.reshape(*actions.shape[:-1], 3), actions[..., 6:]], -1)

    return changed


def _in_frame(actions: Tensor, demos: Demonstrations, kind: str, inverse: bool) -> Tensor:
    """Returns actions [M, C, A] whose translations and (small) rotations are turned by the state's orientation."""
    size, rotation, _ = ROTATIONS[kind]
    turn = torch.from_numpy(rotation(demos.observation.proprio[:, 3 : 3 + size].numpy()).as_matrix()).float()
    turn, parts = (turn.mT if inverse else turn)[:, None, None], actions[..., :6].unflatten(-1, (2, 3))
    return torch.cat([(turn @ parts[..., None])[..., 0].flatten(-2), actions[..., 6:]], -1)


def _slower(actions: Tensor, sums: bool) -> Tensor:
    """Returns a chunk with two steps in place of each."""
    steps = actions.repeat_interleave(2, 1)[:, : actions.shape[1]]
    return _posed(steps / 2, steps) if sums else steps


def _faster(actions: Tensor, sums: bool) -> Tensor:
    """Returns a chunk with a step in place of two."""
    half = actions.shape[1] // 2
    pairs = actions[:, : 2 * half].unflatten(1, (half, 2))
    steps = _posed(pairs.sum(2), pairs[:, :, 1]) if sums else pairs[:, :, 1]
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


def _posed(poses: Tensor, others: Tensor) -> Tensor:
    """Returns the pose of actions of 7 entries with the gripper of `others`; other actions have no gripper."""
    return torch.cat([poses[..., :_GRIPPER], others[..., _GRIPPER:]], -1) if poses.shape[-1] == _GRIPPER + 1 else poses


def _moved(actions: Tensor, demos: Demonstrations, sign: float) -> Tensor:
    return _posed(actions + sign * demos.observation.proprio[:, None, : actions.shape[-1]], actions)


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
    path, value = ("data", config.data) if config.env is None else ("env.task", config.env.task)
    action = "use one with the policy's cameras, state and actions, or rename its features"
    for name in spec.cameras:
        require(name in dataset.cameras, path, value, f"the policy sees a camera {name!r}", action)
    for name, size, needed in (
        (ACTION, dataset.size(ACTION), spec.action_dim),
        (STATE, dataset.state.shape[1], spec.proprio_dim),
    ):
        require(size == needed, path, value, f"{name} has {size} entries and the policy {needed}", action)
    frames = np.unique(np.linspace(0, len(dataset) - 1, config.num_frames).astype(np.int64))
    demos = RecordedChunks(dataset, frames, spec, FrameCache(_FRAME_CACHE_BYTES)).rows(range(len(frames)))
    return partial(predicted, policy), demos, greedy_noise(policy, len(demos))


def greedy_noise(policy: Policy, rows: int) -> Tensor | None:
    """Returns the noise with which a flow begins, the same for every fault."""
    start = policy.spec.greedy_noise
    return None if start is None else start.draw(0, "conventions", np.arange(rows))


def predicted(policy: Policy, seen: Observation) -> Tensor:
    """Returns a policy's actions, float32 [M, C, A], as in an evaluation."""
    noise = greedy_noise(policy, len(seen))
    return policy.act(policy.encode(seen), noise, 1.0 if noise is None else 0.0).actions.float()


def open_policy(config: ConventionsConfig, dataset: RecordedDataset) -> Policy:
    """Returns the checkpoint's policy; a published one acts in what the dataset shows."""
    if config.policy is None:
        return load_policy(trained_under(config.checkpoint).policy, config.checkpoint, "cpu").policy
    section = replace(config.policy, critic=Critic.observation)
    described = read_json(Path(config.checkpoint) / "config.json", "give a published folder")
    cameras = config.cameras or list(dataset.cameras)
    known = set(cameras) <= set(dataset.cameras)
    require(known, "cameras", cameras, f"the data has {', '.join(dataset.cameras)}", "use some of these")
    spec = spec_of(dataset, cameras, config.chunk or int(described.get("chunk_size", 1)))
    return load_policy(section, config.checkpoint, "cpu", spec).policy


def spec_of(dataset: RecordedDataset, cameras: Sequence[str], chunk: int) -> EnvSpec:
    """Returns what a policy acts in if nothing but a dataset is known: the robot of the dataset."""
    images = {name: dataset.image_size(name) for name in cameras}
    features = features_of(images, {"proprio": sum(dataset.states.values())})
    return EnvSpec("data", 1, chunk, chunk, dataset.size(ACTION) or 0, features, "recorded")


def compose_check(words: Sequence[str]) -> ConventionsConfig:
    """Returns the config of the command's words; those of policy and env are as in a training and an export."""
    of = {name: [word for word in words if word.startswith((f"{name}=", f"{name}."))] for name in ("policy", "env")}
    config = compose(ConventionsConfig, [word for word in words if word not in of["policy"] + of["env"]])
    if of["policy"]:
        config.policy = compose_train(of["policy"]).policy
    if of["env"] or (not config.data and (Path(config.checkpoint) / CONDITIONS).is_file()):
        config.env = compose_export([*of["env"], f"checkpoint={config.checkpoint}", "policy=expert", "out=-"]).env
    return config


def check(config: ConventionsConfig) -> int:
    given, rule = bool(config.data) or config.env is not None, "demonstrations are needed"
    require(given, "data", config.data, rule, "give data=<folder> or env=<preset>")
    num_faults = _checked(replace(config, env=None)) if config.data else 0
    if config.env is not None:
        with TemporaryDirectory() as place:
            recording = ExportConfig(out=place, policy="expert", env=config.env, num_episodes=config.num_episodes)
            export_dataset(recording, lambda *progress: None)
            print(f"{config.num_episodes} episodes of the expert in {config.env.task}")
            num_faults += _checked(replace(config, data=place))
    return 1 if num_faults else 0


def _checked(config: ConventionsConfig) -> int:
    predict, demos, _ = read_demonstrations(config)
    with torch.no_grad():
        faults = find_faults(predict, demos, config.min_gain)
        error = float(errors_of(predict(demos.observation), demos).nanmean())
    print(f"{len(demos)} frames; mean error of an action {error:.3f} of its standard deviation")
    for fault in faults:
        print(f"found: {fault.name}: undone, the error falls from {fault.error:.3f} to {fault.error_undone:.3f}")
        for name in fault.alternatives:
            print(f"   or: {name}")
    print(f"{len(faults)} faults found" if faults else "no fault found")
    return len(faults)


if __name__ == "__main__":
    main(check, ConventionsConfig, compose_check)
