"""An env of this project behind a websocket (experiments/serve_env.py), for clients with env=remote (envs/remote.py).

    connections (event loop)  --questions-->  one thread: the rows of all sessions, one question after the other

Each session has its own rows.  Its last answer is kept and repeated if its question is sent again.  A session ends when
its client closes it or has had no connection for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Facts
from envs.remote import VERSION
from envs.simulator import Measurement
from rlinf_embodied.config import ServeEnvConfig
from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.interfaces.serving import listen, pack, unpack
from rlinf_embodied.plug_ins import load_target

KEPT_S = 60.0  # how long a session without a connection is kept
_CLIENT_KEYS = ("task", "cameras", "obs_size", "chunk", "horizon", "hold_steps", "control_hz")  # of section env


class ServedRows:
    """The rows of a session."""

    def __init__(self, env: EpisodeEnv) -> None:
        """Takes an env, whose `Simulator` answers the questions; its episodes are not used."""
        self.env, self._sim = env, env.simulator

    def facts(self) -> Facts:
        sim = self._sim
        state = self._state(sim.measure(torch.zeros(sim.num_rows, sim.action_dim)))
        sizes = {name: None if value.ndim == 1 else value.shape[1] for name, value in state.items()}
        return Facts(
            tasks=[(task.name, task.instruction) for task in self.env.row_tasks()[:1]],
            action_dim=sim.action_dim,
            state={name: size for name, size in sizes.items() if name not in ("reward", "success")},
            backend=sim.backend,
            vectors=dict(sim.state_vectors),
            scripted=sim.expert is not None,
            has_success=sim.has_success,
            history_free=sim.history_free,
            categorical=sim.categorical,
            control_hz=sim.control_hz,
        )

    def run(self, kind: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question of envs/foreign/wire.py.

        Raises:
            SimulatorError: the question is unknown, or the simulator failed.
        """
        sim, rows = self._sim, [int(row) for row in question["rows"]]
        if kind == "images":
            return {"kind": "images", "images": self._images(rows, question.get("film", 0))}
        if kind == "expert" and sim.expert is not None:
            return {"kind": "actions", "actions": sim.expert()[rows].cpu().numpy()}
        actions = torch.zeros(sim.num_rows, sim.action_dim)
        if kind == "reset":
            sim.reset(rows, [int(start[2]) for start in question["starts"]])
        elif kind == "step":
            actions[rows] = torch.from_numpy(question["actions"].copy())
            sim.step(actions, rows)
        else:
            raise SimulatorError(f"{kind!r} is not a question that this server can answer: see docs/serving.md")
        state = {name: value[rows] for name, value in self._state(sim.measure(actions)).items()}
        tasks = self.env.row_tasks()
        return {"kind": "state", "tasks": [[tasks[row].name, tasks[row].instruction] for row in rows], **state}

    def _state(self, measured: Measurement) -> dict[str, np.ndarray]:
        columns = {name: getattr(measured, name) for name in Measurement.__dataclass_fields__}
        columns["object"] = self._sim.object_positions()
        return {name: value.cpu().numpy() for name, value in columns.items() if value is not None}

    def _images(self, rows: list[int], film: int) -> np.ndarray:
        """Returns uint8 [R, K, H, W, 3] of the cameras, or for videos [R, size, size, 3]."""
        if film:
            frames = self._sim.film(rows, film)
            if len(frames) != len(rows):
                raise SimulatorError(f"{self._sim.backend} renders no videos: use eval.record_video=false")
            return torch.stack([frames[row] for row in rows]).cpu().numpy()
        return torch.stack([*self._sim.images(rows).values()], 1).cpu().numpy()


@dataclass(slots=True)
class _Session:
    rows: ServedRows
    connection: ServerConnection  # of its last question
    number: int = 0  # of the last question
    answer: bytes = b""


class EnvServer:
    """The env of a config, opened once per session."""

    def __init__(self, config: ServeEnvConfig, device: str) -> None:
        self._config, self._device = config, device
        self._sessions: dict[str, _Session] = {}
        self._thread = ThreadPoolExecutor(1, "env")

    async def run(self) -> None:
        """Serves until SIGINT or SIGTERM; raises ConfigError if the port cannot be used."""
        config, env = self._config, self._config.env
        settings = {name: getattr(env, name) for name in _CLIENT_KEYS if getattr(env, name)}
        words = " ".join(f"env.{name}={value}" for name, value in settings.items()).replace("'", "").replace(", ", ",")
        what = f"{env.task}, for env=remote {words} env.options.url="
        await listen(self._client, config.host, config.port, {"/healthz": lambda: "OK"}, what)
        for session in self._sessions.values():
            session.rows.env.close()

    async def _client(self, connection: ServerConnection) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for data in connection:
                await connection.send(await loop.run_in_executor(self._thread, self._answer, data, connection))
        except ConnectionClosed:
            pass  # the client may reconnect
        finally:
            loop.call_later(KEPT_S, self._thread.submit, self._forget, connection)

    def _answer(self, data: bytes | str, connection: ServerConnection) -> bytes:
        number = 0
        try:
            question = unpack(data)
            key, number, kind = question["session"], int(question["number"]), question["kind"]
            session = self._sessions.get(key)
            if kind == "open" and session is None:
                session = self._sessions[key] = _Session(self._open_rows(question), connection)
            if session is None:
                raise SimulatorError(
                    "it does not know this session: the server was restarted, or the session has expired"
                )
            session.connection = connection
            if number != session.number:
                session.number = number
                session.answer = pack({**self._run(key, session, kind, question), "number": number})
            return session.answer
        except Exception as error:  # noqa: BLE001 - its client raises it
            return pack({"kind": "error", "number": number, "text": _text(error)})

    def _run(self, key: str, session: _Session, kind: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a new question.  An error is an answer, too: a step that failed is not run again."""
        try:
            if kind == "open":
                return {"kind": "opened", **asdict(session.rows.facts())}
            if kind == "close":
                del self._sessions[key]
                session.rows.env.close()
                return {"kind": "closed"}
            return session.rows.run(kind, question)
        except Exception as error:  # noqa: BLE001 - its client raises it
            return {"kind": "error", "text": _text(error)}

    def _open_rows(self, question: Mapping[str, Any]) -> ServedRows:
        env, rows = self._config.env, int(question["rows"])
        if question["version"] != VERSION:
            raise SimulatorError(
                f"it speaks protocol version {VERSION}, and not {question['version']}: use the same version of "
                "rlinf_embodied on both sides"
            )
        if question["task"] != env.task:
            raise SimulatorError(f"it serves {env.task}, and not {question['task']}: use env.task={env.task}")
        if self._config.run.exact.holds and self._device == "cpu":
            torch.set_num_threads(1)  # as a worker
        cameras, size = list(question["cameras"]), int(question["size"])
        section = replace(env, num_envs=rows, block_size=rows, cameras=cameras, obs_size=size)
        built = load_target(env._target_)(section, rows, self._device)
        if not isinstance(built, EpisodeEnv):
            raise SimulatorError(f"{env._target_} makes a {type(built).__name__}, and only an EpisodeEnv can be served")
        return ServedRows(built)

    def _forget(self, connection: ServerConnection) -> None:
        for key in [key for key, session in self._sessions.items() if session.connection is connection]:
            self._sessions.pop(key).rows.env.close()


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, SimulatorError) else f"{type(error).__name__}: {error}"


def serve_env(config: ServeEnvConfig, device: str) -> None:
    """Serves the env that the config names on a device until a signal ends it."""
    asyncio.run(EnvServer(config, device).run())
