"""Plants faults in recorded episodes and prints which of them experiments/check_conventions.py names.

python -m experiments.bench.conventions data=<dataset> [policy=pi0] [seeds=[0]] [steps=1500] [faults=[]]

A small policy (pi0, openvla_oft or tiny_vla) is fitted to all frames of the dataset, in which nothing is planted.
Actions have 7 entries, those of BridgeData: a pose relative to the last one, then a gripper in [0, 1].  A fault is
named if it is the only one reported, or among those that explain the data as well.  Exit code 1: something else was
reported, for example a fault in the clean dataset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.check_conventions import (
    Fault,
    Predict,
    compose_check,
    errors_of,
    find_faults,
    open_policy,
    predicted,
    spec_of,
)
from experiments.examples import small_openvla, small_pi
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config.checks import require_one_of
from rlinf_embodied.data.conversions import ROTATIONS
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset
from rlinf_embodied.embodied.demonstrations import RecordedChunks
from rlinf_embodied.embodied.policy_folder import new_policy
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import ImitationPolicy

CHUNK = 4
_BATCH = 32
DEGREES = 57.29578
_WITHOUT = 0.25  # share of rows that are fitted without their state, and without their images, so that both count
Plant = Callable[[Demonstrations], Demonstrations]  # of chunks of 2 * CHUNK actions, cut afterwards


@dataclass(kw_only=True)
class Options:
    """The arguments."""

    data: str = ""  # a folder of LeRobot or RLDS
    policy: str = "pi0"  # or openvla_oft, tiny_vla
    seeds: list[int] = field(default_factory=lambda: [0])
    steps: int = 1500  # of 32 chunks
    image_size: int = 28  # of pi0 and openvla_oft
    cameras: list[str] = field(default_factory=list)  # []: all
    faults: list[str] = field(default_factory=list)  # beginnings of names; []: all
    convert_state: list[str] = field(default_factory=list)  # as warm_start.convert_state

    def __post_init__(self) -> None:
        require_one_of(self, "", "policy", "pi0", "openvla_oft", "tiny_vla")


# --------------------------------------------------------------------------------------------------------------- faults
def on_images(change: Callable[[Tensor], Tensor], *cameras: str) -> Plant:
    """Returns a fault of the images of some cameras, or of all."""

    def plant(demos: Demonstrations) -> Demonstrations:
        shown = {n: change(x) if not cameras or n in cameras else x for n, x in demos.observation.images.items()}
        return replace(demos, observation=replace(demos.observation, images=shown))

    return plant


def on_state(change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda demos: replace(demos, observation=demos.observation.with_proprio(change(demos.observation.proprio)))


def on_actions(change: Callable[[Tensor], Tensor]) -> Plant:
    return lambda demos: replace(demos, actions=change(demos.actions))


def _swapped(demos: Demonstrations) -> Demonstrations:
    names, images = list(demos.observation.images), list(demos.observation.images.values())
    return replace(demos, observation=replace(demos.observation, images=dict(zip(names, images[::-1], strict=True))))


def _late(demos: Demonstrations) -> Demonstrations:
    assert demos.is_pad is not None
    return replace(demos, actions=demos.actions[:, 1:], is_pad=demos.is_pad[:, 1:])


def _at_twice_the_rate(actions: Tensor) -> Tensor:
    return torch.cat([actions[..., :6] / 2, actions[..., 6:]], -1).repeat_interleave(2, 1)


def _at_half_the_rate(demos: Demonstrations) -> Demonstrations:
    assert demos.is_pad is not None
    pairs = demos.actions.unflatten(1, (-1, 2))
    actions = torch.cat([pairs[..., :6].sum(2), pairs[:, :, 1, 6:]], -1)
    return replace(demos, actions=actions, is_pad=demos.is_pad.unflatten(1, (-1, 2)).any(2))


def _in_tool(demos: Demonstrations) -> Demonstrations:
    _, rotation, _ = ROTATIONS["euler_xyz"]
    turn = torch.from_numpy(rotation(demos.observation.proprio[:, 3:6].numpy()).as_matrix()).float().mT[:, None]
    parts = [(turn @ demos.actions[..., k : k + 3, None])[..., 0] for k in (0, 3)]
    return replace(demos, actions=torch.cat([*parts, demos.actions[..., 6:]], -1))


def _as_euler_angles(actions: Tensor) -> Tensor:
    angles = ROTATIONS["euler_xyz"][2](ROTATIONS["rotation_vector"][1](actions[..., 3:6].reshape(-1, 3).numpy()))
    angles = torch.from_numpy(angles).float().reshape(*actions.shape[:-1], 3)
    return torch.cat([actions[..., :3], angles, actions[..., 6:]], -1)


def _absolute(demos: Demonstrations) -> Demonstrations:
    moved = demos.actions[..., :6] + demos.observation.proprio[:, None, :6]
    return replace(demos, actions=torch.cat([moved, demos.actions[..., 6:]], -1))


def faults_for(cameras: list[str], state_dim: int) -> Iterator[tuple[str, Plant]]:
    """Yields the faults that are planted, by the name that the command must give them."""
    everything, last = ", ".join(cameras), cameras[-1]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "upside down": lambda x: x.flip(-3),
        "mirrored": lambda x: x.flip(-2),
        "BGR, not RGB": lambda x: x.flip(-1),
        "cropped to 0.9 of their area": lambda x: _grown(x, -2),  # of 64 pixels
        "not cropped to 0.9 of their area": lambda x: _grown(x, 2),
    }
    for name, way in ways.items():
        yield f"images of {everything} are {name}", on_images(way)
    yield f"images of {last} are rotated by 180 degrees", on_images(lambda x: x.flip(-3, -2), last)
    yield f"images of {last} are rotated by 90 degrees to the left", on_images(lambda x: x.rot90(1, (-3, -2)), last)
    if len(cameras) == 2:
        yield f"cameras {' and '.join(cameras)} are swapped", _swapped
    yield "entries 0 and 1 of the state are swapped", on_state(lambda s: s[:, [1, 0, *range(2, state_dim)]])
    yield "the state is in degrees, not radians", on_state(lambda s: s * DEGREES)
    if state_dim == 8:
        first = [0, 1, 2, 6, 3, 4, 5, 7]
        yield "the quaternion at 3 of the state has its real part first", on_state(lambda s: s[:, first])
    yield "entry 0 of the actions has the other sign", on_actions(lambda a: a * torch.tensor([-1.0, *[1.0] * 6]))
    yield "entries 0 and 2 of the actions are swapped", on_actions(lambda a: a[..., [2, 1, 0, 3, 4, 5, 6]])
    gripper = "entry 6 of the actions (a gripper's place) lies in"
    with_last = lambda change: on_actions(lambda a: torch.cat([a[..., :6], change(a[..., 6:])], -1))  # noqa: E731
    yield f"{gripper} [0, 1], and the other end is open", with_last(lambda a: 1 - a)
    yield f"{gripper} [-1, 1], not [0, 1]", with_last(lambda a: 2 * a - 1)
    yield "the actions are in degrees, not radians", on_actions(lambda a: a * DEGREES)
    scale = torch.tensor([1, 3, 0.3, 1, 4, 1, 1])
    statistics = "the actions have another scale and offset in each entry (statistics)"
    yield statistics, on_actions(lambda a: a * scale + 0.02)
    yield "the actions are absolute, not relative to the state", _absolute
    rate = "the frame rate that the policy learned (relative actions)"
    yield f"the data has twice {rate}", on_actions(_at_twice_the_rate)
    yield f"the data has half {rate}", _at_half_the_rate
    yield "the actions begin one step late", _late
    form = "orientation at 3 of the state: Euler angles"
    if state_dim == 7:
        yield f"the actions are in the frame of the tool, not the base ({form})", _in_tool
    yield "the rotations of the actions are Euler angles, not rotation vectors", on_actions(_as_euler_angles)


def _grown(images: Tensor, border: int) -> Tensor:
    """Returns images of the same size that show a border more, or less if it is negative."""
    pixels, size = images.movedim(-1, -3).float(), images.shape[-3:-1]
    framed = F.pad(pixels, [border] * 4, mode="replicate" if border > 0 else "constant")
    return F.interpolate(framed, size, mode="bilinear").round().to(torch.uint8).movedim(-3, -1)


# ------------------------------------------------------------------------------------------------------------- policies
def written(own: Options, folder: Path) -> RecordedDataset:
    """Writes the dataset as LeRobot's, with statistics, and returns it."""
    given = open_dataset(own.data, "data", (), own.convert_state)
    episodes = []
    for rows in map(given.frames, range(given.num_episodes)):
        shown = {name: given.images(name, np.array(rows)) for name in own.cameras or given.cameras}
        part = slice(rows.start, rows.stop)
        episodes.append(LeRobotEpisode(given.task(rows.start), given.columns[ACTION][part], given.state[part], shown))
    write_dataset(folder, episodes, round(given.fps), "recorded")
    return open_dataset(folder, "data")


def new_small(own: Options, data: Path, seed: int) -> ImitationPolicy:
    """Returns a small policy with random weights for a dataset that `written` wrote."""
    dataset, folder = open_dataset(data, "data"), data.with_name("policy")
    critic, words = "policy.critic=observation", " ".join(dict.fromkeys(" ".join(dataset.tasks).split()))
    if own.policy == "tiny_vla":
        sizes = [f"policy.options.{text}" for text in ("hidden_size=64", "stem_width=16", "num_layers=2")]
        modes = ["policy.normalise_actions=min_max", "policy.normalise_state=mean_std"]
        config = compose_train([critic, *modes, *sizes]).policy
        spec = spec_of(dataset, list(dataset.cameras), CHUNK)
        policy = cast(ImitationPolicy, new_policy(config, spec, seed, "cpu"))
        measured = json.loads((data / "meta" / "stats.json").read_text())
        statistics = {n: {k: torch.tensor(v).float() for k, v in measured[n].items()} for n in (ACTION, STATE)}
        policy.normalise_by(statistics)
        return policy
    shared: dict[str, Any] = {
        "out": str(folder),
        "data": str(data),
        "instruction": words,
        "image_size": own.image_size,
        "seed": seed,
    }
    options = ["clip_actions=false", "freeze_vision=false"]
    if own.policy == "pi0":
        cameras = list(dataset.cameras)
        small_pi.write_small(small_pi.Options(cameras=cameras, chunk=CHUNK, hidden_size=64, **shared))
        options.append("expert_only=false")
    else:
        small_openvla.write_small(small_openvla.Options(**shared))
        options += ["head=l1", "proprio=true", "new_parts=true"]
    given = [f"policy={own.policy}", critic, *(f"policy.options.{option}" for option in options)]
    config = compose_check([f"checkpoint={folder}", f"data={data}", f"chunk={CHUNK}", *given])
    return cast(ImitationPolicy, open_policy(config, dataset))


def fit(policy: ImitationPolicy, demos: Demonstrations, steps: int, seed: int) -> None:
    """Fits a policy to chunks."""
    parameters, generator = policy.imitation_parameters(True), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    with torch.no_grad():
        features = policy.encode_trainable(demos.observation)
    for step in range(steps):
        index = torch.randint(len(demos), (_BATCH,), generator=generator)
        part, rows = demos.rows(index, images=False), {name: column[index] for name, column in features.items()}
        drawn = torch.rand(_BATCH, generator=generator)
        for name in [name for name in rows if name == "proprio" or name.startswith("images")]:
            absent = drawn < _WITHOUT if name == "proprio" else drawn > 1 - _WITHOUT
            rows[name] = rows[name].masked_fill(absent.view(-1, *[1] * (rows[name].ndim - 1)), 0)
        targets = part.targets("cpu")
        if policy.imitation_noise is not None:
            targets["noise"] = policy.imitation_noise.draw(0, "fit", step, range(_BATCH))
        optimizer.zero_grad()
        (policy.imitation_loss(rows, part.actions, targets) / _BATCH).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rate.step()


# ---------------------------------------------------------------------------------------------------------------- table
def cut(demos: Demonstrations) -> Demonstrations:
    """Returns chunks of CHUNK actions."""
    assert demos.is_pad is not None
    return replace(demos, actions=demos.actions[:, :CHUNK], is_pad=demos.is_pad[:, :CHUNK])


def fitted(own: Options, data: Path, seed: int) -> tuple[ImitationPolicy, Demonstrations]:
    """Returns a policy that was fitted to a dataset that `written` wrote, and its chunks of 2 * CHUNK actions."""
    policy, dataset = new_small(own, data, seed), open_dataset(data, "data")
    spec = spec_of(dataset, list(dataset.cameras), 2 * CHUNK)
    wide = RecordedChunks(dataset, np.arange(len(dataset)), spec, FrameCache(1e9)).rows(range(len(dataset)))
    fit(policy, cut(wide), own.steps, seed)
    return policy, wide


def remembered(policy: ImitationPolicy) -> Predict:
    """Returns a policy's predictions; those of an observation that was predicted before are not computed again."""
    known: dict[bytes, Tensor] = {}

    def predict(seen: Observation) -> Tensor:
        content = [seen.proprio, *seen.images.values()]
        key = sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in content)).digest()
        if key not in known:
            known[key] = predicted(policy, seen)
        return known[key]

    return predict


def named(name: str, found: list[Fault]) -> bool:
    return len(found) == 1 and name in (found[0].name, *found[0].alternatives)


def measure(own: Options) -> int:
    """Prints a table; returns the exit code."""
    wrong = 0
    with TemporaryDirectory() as place:
        dataset = written(own, data := Path(place) / "data")
        faults = [("", lambda demos: demos), *faults_for(list(dataset.cameras), dataset.state.shape[1])]
        for seed in own.seeds:
            policy, wide = fitted(own, data, seed)
            predict = remembered(policy)
            with torch.no_grad():
                error = float(errors_of(predict(wide.observation), cut(wide)).nanmean())
            print(f"\n{own.policy}, seed {seed}, error {error:.3f}\n\n| planted fault | reported |\n|---|---|")
            for name, plant in faults:
                if name and own.faults and not name.startswith(tuple(own.faults)):
                    continue
                with torch.no_grad():
                    found = find_faults(predict, cut(plant(wide)))
                fits = named(name, found) if name else not found
                wrong += bool(found) and not fits
                texts = [
                    f"{' or '.join([each.name, *each.alternatives])} ({each.error:.2f} to {each.error_undone:.2f})"
                    for each in found
                ]
                print(
                    f"| {name or 'none'} | {'as planted: ' * fits * bool(name)}{'; '.join(texts) or '-'} |", flush=True
                )
    return int(wrong > 0)


if __name__ == "__main__":
    main(measure, Options)
