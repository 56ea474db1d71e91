"""A robot or simulator on another machine: env=remote env.options.url=ws://<host>:<port> (docs/serving.md).

The questions are those of envs/foreign/wire.py.  Each is a msgpack dict over a websocket (interfaces/serving.py) with
its `kind`, values and arrays, the `number` of the question and the `session` that it belongs to:

    {"session": "6f1c...", "number": 7, "kind": "step", "rows": [0], "actions": float32 [1, 7]}
    {"number": 7, "kind": "state", "reward": float32 [1], "success": bool [1], "proprio": float32 [1, P], ...}

A question without an answer is sent again under its number, over a new connection if the old one broke.  The server
runs each number once and repeats its answer, so no step is lost or run twice.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Adapter, Facts
from envs.foreign.env import ForeignSimulator
from envs.foreign.wire import Message
from rlinf_embodied.config import EnvConfig, EnvOptions
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.errors import ConfigError, ServerError, SimulatorError
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.serving import MAX_BYTES, pack, unpack

VERSION = 1  # of these messages
_OPEN_S = 600.0  # limit for the first answer, before which a server builds its simulator


@dataclass(kw_only=True, slots=True)
class RemoteOptions(EnvOptions):
    """The options in env.options."""

    url: str = ""  # ws://<host>:<port>
    timeout_s: float = 10.0  # for an answer; then the question is sent again
    retries: int = 5  # how often a question is sent again

    def __post_init__(self) -> None:
        rule, action = "it names a websocket", "use ws://<host>:<port>, as serve_env.py prints it"
        require(self.url.startswith(("ws://", "wss://")), "env.options.url", self.url, rule, action)
        require_numbers(self, "env.options", "timeout_s", above=True)
        require_numbers(self, "env.options", "retries")


class Server:
    """A server on another machine as a `Link`; lost messages are sent again, so every question gets one answer."""

    def __init__(self, options: RemoteOptions, opening: Mapping[str, Any]) -> None:
        """Connects, and asks the server to open its rows.

        Raises:
            ConfigError: no server answers at the url.
            SimulatorError: it cannot open these rows, or speaks another protocol.
        """
        self._options, self._session, self._number = options, uuid.uuid4().hex, 0
        self._kind, self._question = "", b""
        try:
            self._socket: ClientConnection | None = self._connected()
        except (WebSocketException, OSError) as error:
            action = "start it with experiments/serve_env.py"
            raise ConfigError(
                f"env.options.url is {options.url!r}, but no env server answers there ({error}): {action}"
            ) from error
        self.ask({"kind": "open", "version": VERSION, **opening})
        opened = self.answer(_OPEN_S)
        try:
            self.facts = Facts.of(opened)
        except TypeError as error:
            raise self._foreign(f"its answer to 'open' is {sorted(opened)}") from error

    def ask(self, question: Message) -> None:
        self._number, self._kind = self._number + 1, question["kind"]
        self._question = pack({"session": self._session, "number": self._number, **question})
        self._send()

    def close(self) -> None:
        self.ask({"kind": "close"})
        if self._socket is not None:
            self._socket.close()

    def _connected(self) -> ClientConnection:
        options = self._options
        return connect(options.url, compression=None, max_size=MAX_BYTES, open_timeout=max(5.0, options.timeout_s))

    def _send(self) -> None:
        """Sends the question, over a new connection if there is none; `answer` detects a lost one."""
        with contextlib.suppress(WebSocketException, OSError):
            self._socket = self._socket or self._connected()
            self._socket.send(self._question)

    def answer(self, timeout_s: float | None = None) -> Message:
        """Returns the answer; raises SimulatorError if the server fails, is gone or uses another protocol."""
        timeout_s, why = timeout_s or self._options.timeout_s, "it cannot be reached"
        for attempt in range(1 + self._options.retries):
            if attempt:
                self._send()
            try:
                while self._socket is not None:
                    answer = self._read(self._socket.recv(timeout_s))
                    if answer is not None:
                        return answer
            except TimeoutError:
                why = f"no answer in {timeout_s:g} s"
            except (WebSocketException, OSError) as error:
                why, self._socket = str(error), None
        options, attempts = self._options, f"{self._kind!r} was sent {1 + self._options.retries} times"
        raise SimulatorError(
            f"the env server at {options.url} is gone ({why}; {attempts}): check that it runs and can be reached, or "
            "use a larger env.options.timeout_s or retries, then run the same command again"
        )

    def _read(self, data: bytes | str) -> Message | None:
        """Returns the answer in a message; None if it is a late answer to an earlier question."""
        try:
            answer = {} if isinstance(data, str) else unpack(data)
        except ServerError:
            answer = {}
        if not isinstance(answer.get("kind"), str) or not isinstance(answer.get("number"), int):
            raise self._foreign(f"{str(data)[:60]!r} is no answer")
        if answer.pop("number") != self._number:
            return None
        if answer["kind"] == "error":
            action = "fix that, then run the same command again"
            raise SimulatorError(
                f"the env server at {self._options.url} failed in {self._kind!r}: {answer.get('text')} ({action})"
            )
        return answer

    def _foreign(self, what: str) -> SimulatorError:
        action = "give the url of experiments/serve_env.py, or see docs/serving.md for the messages"
        return SimulatorError(f"the server at {self._options.url} speaks another protocol ({what}): {action}")


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of the server; arguments as envs.maniskill.make_env, tensors are on the CPU.

    Raises:
        ConfigError: an option is unknown, no server answers at the url, or env.control_hz is not the robot's.
        SimulatorError: the server cannot open these rows, or speaks another protocol.
    """
    opening = {"task": config.task, "rows": num_envs, "cameras": list(config.cameras), "size": config.obs_size}
    link = Server(read_options(config), opening)
    simulator = ForeignSimulator(config, Adapter(config.task, None), link.facts, [range(num_envs)], [link])
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)


def read_options(config: EnvConfig) -> RemoteOptions:
    """Returns the checked options of a section."""
    return typed(config.options, RemoteOptions, "env.options")
