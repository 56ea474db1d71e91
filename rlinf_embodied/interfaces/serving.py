"""openpi's and vla-eval's websocket protocols, between a policy server and its clients (docs/serving.md).

    on connection    server -> client    metadata, a dict
    then, in turn    client -> server    an observation, a dict
                     server -> client    {"actions": float32 [C, A], "server_timing": {...}}, or an error text

Messages are msgpack; arrays are {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [5, 7]}.  A server of
this project describes itself under "rlinf" in its metadata.  It also accepts requests of B rows with the entry
"rlinf": {"rows": B, "temperature": float, "noise": [B, ...] or None}, each of which is a separate policy call.

vla-eval's protocol is used if the path of the url is /vla-eval.  A message is {"type", "payload", "seq", "timestamp"},
and the keys of arrays are texts:

    on connection    both                "hello" with {"protocol_version": 1, ...}
    episode          client -> server    "episode_start", which ends the running chunk
    then, in turn    client -> server    "observation" with {"images": {...}, "states", "task_description"}
                     server -> client    "action" with {"actions": float32 [A] or [C, A]}, or "error"; equal seq
"""

from __future__ import annotations

import asyncio
import io
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

import msgpack
import numpy as np
import torch
from PIL import Image
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import WebSocketException
from websockets.http11 import Request, Response
from websockets.sync.client import connect

from rlinf_embodied.config.checks import by_dotted_key
from rlinf_embodied.errors import ConfigError, ServerError
from rlinf_embodied.interfaces.envs import EnvSpec, FeatureKind, Observation

VERSION = 1  # of "rlinf"
VLA_EVAL = "/vla-eval"  # path of a url; all others are openpi's
VLA_EVAL_HELLO = {"harness_version": "0.8.0", "protocol_version": 1}
MAX_BYTES = 1 << 28  # of a message
STATE, IMAGES = "observation.state", "observation.images."  # LeRobot's names
PRIVILEGED, PROMPT, OURS = "observation.privileged", "prompt", "rlinf"
_OF_VLA_EVAL = {STATE: "states", PROMPT: "task_description"}  # its names of ours
_BY_POSITION = (("observation.image", "image"), ("observation.wrist_image", "wrist_image"))  # openpi's LIBERO


def pack(message: Mapping[str, Any]) -> bytes:
    """Returns a message as bytes."""
    return cast(bytes, msgpack.packb(message, default=_encoded))


def unpack(data: bytes | str) -> dict[str, Any]:
    """Returns the message that bytes hold.

    Raises:
        ServerError: they hold no valid message.
    """
    try:
        message = msgpack.unpackb(data, object_hook=_decoded)
    except (ValueError, TypeError, KeyError) as error:
        raise ServerError(f"a message cannot be read ({error}): pack it as openpi-client does") from error
    if not isinstance(message, dict):
        raise ServerError(f"a message holds a {type(message).__name__} instead of a dict: send what openpi-client does")
    return message


def _encoded(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "VOc":
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decoded(value: dict) -> object:
    if "__image__" in value and value["format"] != "raw":  # of vla-eval
        return np.array(Image.open(io.BytesIO(value["data"])))
    if "__ndarray__" in value or "__image__" in value:
        value = {name.encode(): entry for name, entry in value.items()} | {b"__ndarray__": True}
    if b"__ndarray__" in value:  # `frombuffer` refuses objects
        return np.frombuffer(value[b"data"], np.dtype(value[b"dtype"])).reshape(value[b"shape"])
    return np.asarray(value[b"data"], np.dtype(value[b"dtype"])) if b"__npgeneric__" in value else value


class PolicyClient:
    """A connection to a policy server, by vla-eval's protocol if its url ends in /vla-eval, otherwise by openpi's."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connects, and reads the server's metadata; `timeout_s` is the time limit of each response.

        Raises:
            ConfigError: no policy server answers at the url, or one of another version of the protocol.
        """
        self._url, self._timeout_s, self._is_vla_eval, self._number = url, timeout_s, url.endswith(VLA_EVAL), 0
        try:
            # no pings: a server that compiles its model does not answer them in time
            self._socket = connect(
                url, compression=None, max_size=MAX_BYTES, open_timeout=timeout_s, ping_interval=None
            )
            if self._is_vla_eval:
                self._socket.send(pack_vla_eval("hello", VLA_EVAL_HELLO, 0))
            greeting = unpack(self._socket.recv(timeout_s))
            self.ours: dict[str, Any] | None = greeting.get(OURS)  # None: another project's
            payload, needed = greeting.get("payload"), VLA_EVAL_HELLO["protocol_version"]
            version = payload.get("protocol_version") if isinstance(payload, dict) else None
            if self._is_vla_eval and version != needed:
                raise ServerError(f"protocol_version of vla-eval's hello is {version}, and not {needed}")
            if self.ours is not None and self.ours.get("version") != VERSION:
                rule = "use the same version of rlinf_embodied on both sides"
                raise ServerError(f"version {self.ours.get('version')} of the protocol, and not {VERSION}: {rule}")
        except (WebSocketException, OSError, ServerError, ValueError) as error:
            action = "start one by `python experiments/serve_policy.py checkpoint=<dir>`, or correct the url, "
            action += f"which ends in {VLA_EVAL} for a server of vla-eval"
            why = f"no policy server answers there ({error or type(error).__name__})"
            raise ConfigError(f"remote.url is {url!r}, but {why}: {action}") from error

    def infer(self, request: Mapping[str, Any], chunk: int) -> np.ndarray:
        """Returns the server's first `chunk` actions, float32 [chunk, A], or [B, chunk, A] for a request with rows.

        Raises:
            ServerError: the server is gone, refused the request, or responded in another form or with fewer actions.
        """
        ask = self._ask_vla_eval if self._is_vla_eval else self._ask_openpi
        actions, ndim = ask(request, chunk), 3 if OURS in request else 2
        if not isinstance(actions, np.ndarray) or actions.ndim != ndim:
            form = getattr(actions, "shape", type(actions).__name__)
            rule = f"`actions` of its response is {form}, not an array of {ndim} dimensions"
            action = "use a server of openpi's protocol, or of vla-eval's with a url that ends in " + VLA_EVAL
            raise ServerError(f"the policy server at {self._url} speaks another protocol: {rule}: {action}")
        if (number := actions.shape[-2]) < chunk:
            rule = f"returns {number} of env.chunk={chunk} actions: use env.chunk={number} or less"
            raise ServerError(f"the policy server at {self._url} {rule}")
        return actions[..., :chunk, :].astype(np.float32)

    def _ask_openpi(self, request: Mapping[str, Any], chunk: int) -> object:
        return unpack(self._ask(pack(request))).get("actions")

    def _ask_vla_eval(self, request: Mapping[str, Any], chunk: int) -> object:
        """Begins an episode, and so a new chunk; a server that returns single actions gets the observation for each."""
        shown: dict[str, Any] = {"images": {}}
        for name, value in request.items():
            part = shown["images"] if np.ndim(value) > 2 else shown
            part[_OF_VLA_EVAL.get(name, name.removeprefix(IMAGES))] = value
        messages, actions = [pack_vla_eval("episode_start", {"task": {"name": request.get(PROMPT)}}, 0)], []
        while len(actions) < chunk:
            self._number += 1
            response = unpack(self._ask(*messages, pack_vla_eval("observation", shown, self._number)))
            payload, messages = response.get("payload"), []
            if response.get("type") == "error":
                action = "compare remote.keys, env.cameras and env.obs_size with what it expects"
                raise ServerError(f"the policy server at {self._url} refused an observation: {payload}: {action}")
            is_answer = response.get("seq") == self._number
            found = payload.get("actions") if is_answer and isinstance(payload, dict) else None
            if not isinstance(found, np.ndarray) or found.ndim != 1:
                return found
            actions.append(found)
        return np.stack(actions)

    def _ask(self, *messages: bytes) -> bytes:
        """Sends messages and returns the response to the last one; the server does not answer the others."""
        try:
            for message in messages:
                self._socket.send(message)
            response = self._socket.recv(self._timeout_s)
        except (WebSocketException, OSError) as error:  # TimeoutError is one
            why = str(error) or f"no answer in {self._timeout_s:g} s"
            action = "start it again, or use a larger remote.timeout_s, then give the same command again"
            raise ServerError(f"the policy server at {self._url} is gone ({why}): {action}") from error
        if isinstance(response, str):
            raise ServerError(f"the policy server at {self._url} refused an observation: {response}")
        return response

    def close(self) -> None:
        self._socket.close()


def pack_vla_eval(kind: str, payload: Mapping[str, Any], number: int) -> bytes:
    """Returns a message of vla-eval as bytes; the keys of its arrays are text."""
    encode = lambda value: {str(key, "ascii"): part for key, part in cast(dict, _encoded(value)).items()}  # noqa: E731
    message = {"type": kind, "payload": payload, "seq": number, "timestamp": time.time()}
    return cast(bytes, msgpack.packb(message, default=encode))


async def listen(
    handle: Callable[[ServerConnection], Awaitable[None]],
    host: str,
    port: int,
    pages: Mapping[str, Callable[[], str]],
    what: str,
) -> None:
    """Serves connections, and `pages` by plain HTTP, until SIGINT or SIGTERM; prints `what` and the url.

    Raises:
        ConfigError: the port cannot be used.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def page(connection: ServerConnection, request: Request) -> Response | None:
        render = pages.get(request.path)
        return None if render is None else connection.respond(HTTPStatus.OK, f"{render()}\n")

    try:
        server = await serve(handle, host, port, compression=None, max_size=MAX_BYTES, process_request=page)
    except OSError as error:
        rule = f"it cannot be opened on {host} ({error.strerror})"
        raise ConfigError(f"port is {port}, but {rule}: use another one, or 0 for any that is free") from error
    async with server:
        print(f"serving {what}ws://{host}:{server.sockets[0].getsockname()[1]} (Ctrl-C ends it)", flush=True)
        await stop.wait()


def observation_of(
    message: Mapping[str, Any], env: EnvSpec, keys: Mapping[str, str], prompt: str | None
) -> Observation:
    """Returns the observation in a request, of one row or of the rows that it declares, as the policy's env has it.

    Keys of nested dicts are joined by ".", which is equivalent to "/".  `keys` maps a request's keys to ours;
    `prompt` is the instruction for requests without one.

    Raises:
        ServerError: an entry is missing or has the wrong shape.
    """
    rows = (message.get(OURS) or {}).get("rows")
    lead = () if rows is None else (rows,)
    given = by_dotted_key({name: value for name, value in message.items() if name != OURS})
    dotted = {key.replace("/", "."): value for key, value in given.items()}
    entries = {keys.get(key, key): value for key, value in dotted.items()}

    def read(shape: tuple[int, ...], *names: str) -> np.ndarray:
        name = next((name for name in names if name in entries), None)
        if name is None:
            action = f"send it as {' or '.join(names)}, or start the server with keys={{<its key>: {names[0]}}}"
            raise ServerError(f"{names[0]} is missing, and the request has {', '.join(sorted(entries))}: {action}")
        value = np.asarray(entries[name])
        if value.ndim >= 3 and value.shape[-3:] == (3, *shape[-3:-1]):  # channels first
            value = np.moveaxis(value, -3, -1)
        if value.shape != (*lead, *shape) or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
            form = (
                f"{value.dtype} {list(value.shape)}" if value.shape != (*lead, *shape) else "not finite, or no numbers"
            )
            raise ServerError(f"{names[0]} is {form}, and the policy reads {[*lead, *shape]}: send that")
        return value.reshape(-1, *shape)

    images = {}
    for place, feature in enumerate(env.of_kind(FeatureKind.image)):
        name = feature.name
        image = read(
            feature.shape,
            f"{IMAGES}{name}",
            f"images.{name}",
            f"observation.{name}",
            *_BY_POSITION[place : place + 1][0] if place < 2 else (),
        )
        image = (255 * image).clip(0, 255) if image.dtype.kind == "f" else image  # as openpi
        images[name] = torch.from_numpy(image.astype(np.uint8))
    numbers = lambda size, *names: torch.from_numpy(read((size,), *names).astype(np.float32))  # noqa: E731
    privileged = numbers(env.privileged_dim, PRIVILEGED) if PRIVILEGED in entries else None
    instructions = [entries[name] for name in (PROMPT, "task", "task_description") if name in entries]
    texts = instructions[0] if instructions else prompt if images else prompt or ""  # numbers alone need no text
    texts = [texts] * (rows or 1) if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ServerError(f"{PROMPT} is {texts!r}: send a text, or start the server with prompt=<text>")
    state = {feature.name: torch.zeros(len(texts), *feature.shape) for feature in env.of_kind(FeatureKind.state)}
    observation = Observation(state, tuple(texts), images, privileged)
    return observation.with_proprio(numbers(env.proprio_dim, STATE, "state", "states")) if state else observation
