"""Batched rows compared bit for bit with stock ManiSkill envs: physical state, reward, info, observations, images.

`Pair` steps both and compares; `compare_episodes` runs it over episodes with a partial reset in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils import common
from sapien import physx
from torch import Tensor

from envs.stock import action_dim, colour_images, recreate_scene, task_actions

_UNCOMPARED = frozenset({"info/elapsed_steps", "info/reconfigure"})  # counted by wrappers, and what reset did
_ANY_SCENE = re.compile(r"scene-\d+_|[-_]\d+$")  # a body's name contains the number of its scene
Values = dict[str, Tensor]  # "kind/name" -> [B, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of a row that is not the stock env's."""

    what: str  # for example "state 1: body cube", "reward", "info/success", "observation/agent/qpos", "rgb/base_camera"
    row: int
    size: float  # largest absolute difference; infinite where shapes differ or only one is a number


class Pair:
    """N batched rows and, for each row, a stock env that is rebuilt for every episode (stock envs keep history)."""

    def __init__(
        self,
        batched: BaseEnv,
        make_stock: Callable[[], BaseEnv],
        anew: bool = True,
        compared: Sequence[int] | None = None,
    ) -> None:
        """Both have obs_mode "state_dict".

        Args:
            batched: the rows.
            make_stock: builds one env without history.
            anew: False recreates a stock env's scene for its later episodes instead of rebuilding the env.
            compared: the rows that have a stock env (default: all).
        """
        self.batched, self.make_stock, self._anew = batched, make_stock, anew
        self.compared = list(range(batched.num_envs)) if compared is None else list(compared)
        self.stock: dict[int, BaseEnv] = {}
        self._expected: dict[int, Values] = {}

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in these rows, each from its own seed."""
        seed_of = dict(zip(rows, seeds, strict=True))
        self.batched.begin(rows, seeds)
        for row in self._compared(rows):
            observation, info = self._fresh_stock(row).reset(seed=seed_of[row])
            self._expected[row] = _named(info, observation)

    def _compared(self, rows: Sequence[int]) -> list[int]:
        return [row for row in rows if row in self.compared]

    def _fresh_stock(self, row: int) -> BaseEnv:
        env = self.stock.get(row)
        if env is not None and not self._anew:
            recreate_scene(env)
            return env
        if env is not None:
            env.close()
        self.stock[row] = self.make_stock()
        return self.stock[row]

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows in both; actions float32 [N, A]."""
        self.batched.advance(task_actions(self.batched, actions), rows)
        for row in self._compared(rows):
            env = self.stock[row]
            observation, reward, _, _, info = env.step(task_actions(env, actions[row : row + 1]))
            self._expected[row] = {**_named(info, observation), "reward": reward}

    def differences(self, rows: Sequence[int], actions: Tensor | None = None) -> list[Difference]:
        """Compares these rows with their stock envs after `reset` (no actions) or `step`."""
        info = self.batched.get_info()
        observation = self.batched.get_obs(info)
        values = _named(info, observation)
        if actions is not None:
            taken = task_actions(self.batched, actions)
            values["reward"] = self.batched.get_reward(obs=observation, action=taken, info=info)
        different = []
        for row in self._compared(rows):
            systems = self.batched.scene.px.systems[row], self.stock[row].scene.px
            state = compare_row(*map(simulated, systems), row=0, num_rows=1)
            different += [replace(difference, row=row) for difference in state]
            different += compare_row(values, self._expected[row], row, self.batched.num_envs)
        return different

    def image_differences(self, rows: Sequence[int]) -> list[Difference]:
        images = _named_images(self.batched)
        expected = {row: _named_images(self.stock[row]) for row in self._compared(rows)}
        return [d for row in expected for d in compare_row(images, expected[row], row, self.batched.num_envs)]

    def close(self) -> None:
        for env in [self.batched, *self.stock.values()]:
            env.close()


def compare_episodes(pair: Pair, steps: int, act: Callable[[int], Tensor], images: bool = False) -> str:
    """Compares an episode of every row, a partial reset in its middle, and a second, half as long episode of every row.

    Args:
        pair: what to compare.
        steps: control steps of the first episode.
        act: the actions [N, A] of a step; steps are numbered through both episodes.
        images: whether images are compared too: after each reset and at the end.

    Returns:
        the largest difference of the first moment that has some, after which nothing is run; "" for none.
    """
    n = pair.batched.num_envs
    everyone, one = list(range(n)), [pair.compared[min(1, len(pair.compared) - 1)]]
    resets = {0: (everyone, 0), steps // 2: (one, n), steps: (everyone, n + 1)}
    for step in range(steps + steps // 2):
        if step in resets:
            rows, offset = resets[step]
            pair.reset(rows, [offset + row for row in rows])
            found = pair.differences(rows) or (pair.image_differences(rows) if images else [])
            if found:
                return _worst(found, f"the reset before step {step}")
        actions = act(step)
        pair.step(actions, everyone)
        if found := pair.differences(everyone, actions):
            return _worst(found, f"step {step}")
    return _worst(pair.image_differences(everyone) if images else [], "the end")


def _worst(differences: Sequence[Difference], moment: str) -> str:
    if not differences:
        return ""
    worst = max(differences, key=lambda difference: difference.size)
    return f"{worst.what} of row {worst.row} differs by {worst.size:.1g} at {moment}"


def wild_actions(env: BaseEnv, seed: int, hold: int = 5) -> Callable[[int], Tensor]:
    """Returns random actions float32 [N, A] over the whole range, held for some steps so that a robot travels.

    Every second row pushes to the limits of its range, which throws arms against tables and legs against the ground.
    """
    space, generator = env.single_action_space, torch.Generator().manual_seed(seed)
    parts = list(space.values()) if hasattr(space, "values") else [space]
    low, high = (torch.cat([torch.as_tensor(getattr(part, end)) for part in parts]) for end in ("low", "high"))
    low, high = torch.where(low.isfinite(), low, -1.0), torch.where(high.isfinite(), high, 1.0)
    drawn = torch.zeros(env.num_envs, action_dim(env))

    def act(step: int) -> Tensor:
        if step % hold == 0:
            share = torch.rand(drawn.shape, generator=generator)
            share[1::2] = share[1::2].round()
            drawn.copy_(low + share * (high - low))
        return drawn.clone()

    return act


def simulated(system: physx.PhysxCpuSystem) -> Values:
    """Returns PhysX's whole state of bodies and joints, drive targets included, by name; each float32 [1, ...]."""
    packed = torch.frombuffer(bytearray(system.pack()), dtype=torch.float32)
    roots = [link for link in system.articulation_link_components if link.is_root]
    names = [f"body {body.entity.name}" for body in system.rigid_dynamic_components]
    names += [f"articulation of {root.entity.name}" for root in roots]
    sizes = [13] * len(system.rigid_dynamic_components) + [13 + 4 * root.articulation.dof for root in roots]
    parts = packed.split(sizes)
    return {
        f"state {k}: {_ANY_SCENE.sub('', name)}": part[None]
        for k, (name, part) in enumerate(zip(names, parts, strict=True))
    }


def _named_images(env: BaseEnv) -> Values:
    return {f"rgb/{name}": image for name, image in colour_images(env).items()}


def _named(info: dict[str, object], observation: dict[str, object]) -> Values:
    leaves = common.flatten_dict_keys({"info": info, "observation": observation})
    return {what: value for what, value in leaves.items() if isinstance(value, Tensor) and what not in _UNCOMPARED}


def compare_row(values: Values, expected: Values, row: int, num_rows: int) -> list[Difference]:
    """Compares one row of `values` [N, ...] with `expected` [1, ...]; means over rows (no axes) are skipped."""
    different = []
    for what in sorted(values.keys() | expected.keys()):
        ours, theirs = values.get(what), expected.get(what)
        if ours is None or theirs is None:
            different.append(Difference(what, row, float("inf")))
        elif not ours.dim() and not theirs.dim() and num_rows > 1:
            continue
        elif not ours.dim() or len(ours) != num_rows or ours.shape[1:] != theirs.shape[1:]:
            different.append(Difference(what, row, float("inf")))
        elif (size := _distance(ours[row], theirs[0])) > 0:
            different.append(Difference(what, row, size))
    return different


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest absolute difference; two NaNs are equal."""
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    apart = (ours - theirs).abs()
    apart[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0
    return float(apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if apart.numel() else 0.0
