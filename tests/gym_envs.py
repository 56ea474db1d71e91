"""Gymnasium envs for tests, registered under "gym_envs:": a walk that ends in four ways, a picture, and a handover."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """A place on a line, moved by the action; `ends` says what happens beyond 1."""

    metadata = {"render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, ends: str = "terminated", space: str = "box", low: float = -2.0) -> None:
        self.render_mode = None
        self.ends = ends
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self.action_space = {
            "box": spaces.Box(low, 4.0, (1,), np.float32),
            "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "several": spaces.MultiDiscrete([2, 3]),
        }[space]
        self.received: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = float(self.np_random.uniform(-0.1, 0.1))
        return np.array([self.place]), {}

    def expert_action(self) -> np.ndarray:
        return np.array([self.place])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        self.place += float(np.ravel(action)[0])
        beyond = self.place > 1
        place = np.nan if beyond and self.ends == "nan" else self.place
        info = {"is_success": beyond} if self.ends == "success" else {}
        return (
            np.array([place]),
            self.place,
            beyond and self.ends != "truncated",
            beyond and self.ends == "truncated",
            info,
        )


class Picture(gymnasium.Env):
    """Shows in which of three places a light is; pointing at it gives 1."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None, dtype: str = "uint8") -> None:
        self.render_mode, self.dtype = render_mode, dtype
        self.observation_space = spaces.Box(0, 255, (6, 6, 3), np.uint8)
        self.action_space = spaces.Discrete(3)

    def _draw(self) -> np.ndarray:
        image = np.zeros((6, 6, 3), self.dtype)
        image[:, 2 * self.where : 2 * self.where + 2] = 255
        return image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.where = int(self.np_random.integers(3))
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = float(action == self.where)
        self.where = int(self.np_random.integers(3))
        return self._draw(), right, False, False, {}

    def render(self) -> np.ndarray:
        return self._draw()


class Dot(gymnasium.Env):
    """A dot that the action moves, nearer to the middle is better; all that it shows is an image, and it never ends."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (16, 16, 3), np.uint8)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-0.9, 0.9, 2)
        return self.render(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = np.clip(self.place + 0.2 * action, -1, 1)
        return self.render(), -float(np.abs(self.place).sum()), False, False, {}

    def render(self) -> np.ndarray:
        x, y = np.meshgrid(np.linspace(-1, 1, 16), np.linspace(-1, 1, 16), indexing="ij")
        light = np.exp(-4 * ((x - self.place[0]) ** 2 + (y - self.place[1]) ** 2))
        return np.repeat((255 * light).astype(np.uint8)[..., None], 3, 2)


class Handover(gymnasium.Env):
    """What gym-aloha is to an observer: only the picture tells one start from another, and nothing is paid for long.

    Two joints follow their targets from one and the same place; a cube lies where a variable of the module says, which
    all envs of a process share and each reset sets.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it
    cube: float = 0.0  # from 0.9 to 1

    def __init__(self, render_mode: str | None = None, wears: bool = False) -> None:
        """`wears`: every step makes the joints slower, and no reset repairs them."""
        self.render_mode, self.wears, self.pull = render_mode, wears, 0.1
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        picture = spaces.Dict({"top": spaces.Box(0, 255, (40, 40, 3), np.uint8)})
        joints = spaces.Box(-1, 1, (2,), np.float64)
        self.observation_space = spaces.Dict({"pixels": picture, "agent_pos": joints})

    def _seen(self) -> dict[str, Any]:
        return {"pixels": {"top": self.render()}, "agent_pos": self.joints.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        Handover.cube = float(self.np_random.uniform(0.9, 1.0))
        self.joints, self.place = np.array([0.4, -0.4]), Handover.cube
        return self._seen(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict[str, Any]]:
        self.joints += self.pull * (action - self.joints)
        self.pull *= 0.99 if self.wears else 1.0
        held = bool(np.abs(self.joints - self.place).max() < 0.05)
        return self._seen(), float(held), held, False, {"is_success": held}

    def render(self) -> np.ndarray:
        image = np.zeros((40, 40, 3), np.uint8)
        image[:20], image[20:] = 120 + 100 * self.joints[0], 120 + 100 * self.joints[1]
        image[round(400 * (self.place - 0.9)) // 2 * 2 % 40 :, :8] = 255
        return image


def still_cart_pole() -> gymnasium.Env:
    """Returns CartPole that shows where cart and pole are, not how fast they move."""
    places = spaces.Box(-5.0, 5.0, (2,), np.float32)
    cart = gymnasium.make("CartPole-v1").unwrapped
    return gymnasium.wrappers.TransformObservation(cart, lambda seen: seen[[0, 2]], places)


gymnasium.register("StillCartPole-v0", still_cart_pole)
gymnasium.register("Walk-v0", Walk, max_episode_steps=3)
gymnasium.register("Picture-v0", Picture)
gymnasium.register("Handover-v0", Handover)
gymnasium.register("Dot-v0", Dot)
