"""A checkpoint behind openpi's and vla-eval's protocols (serve_policy.py), and servers as policies (policy=remote).

    clients (event loop)  --observations-->  queue  --all that wait, at most max_batch-->  policy (a thread)
                          --requests of several rows, each a call by itself------------->

The loop reads and answers while the thread computes: what arrives meanwhile shares the next call.  A request that
cannot be used is answered with a text, and its client may go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from rlinf_embodied.config import Critic, EnvConfig, PolicyConfig, Precision, RemoteConfig, ServeConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.embodied.policy_folder import (
    CONDITIONS,
    TrainedUnder,
    conditions_in,
    load_policy,
    require_policy_class,
    trained_under,
)
from rlinf_embodied.embodied.rollout_stage import computed_in
from rlinf_embodied.errors import ConfigError, ServerError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.serving import (
    OURS,
    VERSION,
    VLA_EVAL,
    VLA_EVAL_HELLO,
    PolicyClient,
    listen,
    observation_of,
    pack,
    pack_vla_eval,
    unpack,
)
from rlinf_embodied.runtime.session import find_cluster

log = logging.getLogger(__name__)
_KEPT = 100_000  # latencies, the last ones
_BAR = 40  # characters
_Answer = tuple[np.ndarray, dict[str, float]]  # actions [C, A] or [B, C, A], server_timing
_Waiting = tuple[Observation, asyncio.Future[_Answer]]


class PolicyServer:
    """The policy of a checkpoint, which answers clients until it is stopped."""

    def __init__(self, config: ServeConfig) -> None:
        """Loads the checkpoint.

        Raises:
            CheckpointError: it is missing or foreign.
            ConfigError: it cannot be served.
        """
        self._config, folder = config, config.checkpoint
        self._trained = trained = trained_under(folder)
        rule = "a server acts for one policy, and this checkpoint has two levels of them"
        require(trained.hierarchy is None, "checkpoint", folder, rule, "use one with one policy")
        require_policy_class(trained.policy, cloned=False)
        self._device = find_cluster(config.cluster).torch_device(0)
        self._alone = config.run.exact.holds and not is_accelerator(self._device)
        loaded = load_policy(trained.policy, folder, self._device).policy
        self._policy = computed_in(trained.precision, loaded, trained.policy, self._device)
        env = getattr(loaded, "env", None)
        rule, action = f"{type(loaded).__name__} does not say what it reads", "set self.env, an EnvSpec, in __init__"
        require(isinstance(env, EnvSpec), "checkpoint", folder, rule, action)
        self._env: EnvSpec = env  # pyright: ignore[reportAttributeAccessIssue]
        self._keys = {theirs.replace("/", "."): ours for theirs, ours in config.keys.items()}
        self._thread, self._queue = ThreadPoolExecutor(1, "policy"), asyncio.Queue[_Waiting]()
        self._num_clients, self._num_drawn, self._num_calls, self._num_rows = 0, 0, 0, 0
        self._latencies = deque[float](maxlen=_KEPT)  # in seconds, from a request's arrival to its answer

    async def run(self) -> None:
        """Serves until SIGINT or SIGTERM, and prints the latencies at the end.

        Raises:
            ConfigError: the port cannot be used.
        """
        config, pages = self._config, {"/healthz": lambda: "OK", "/latency": self.latencies}
        batches = asyncio.create_task(self._answer_batches())
        what = f"{self._policy.spec.name} of {config.checkpoint} on {self._device} at "
        await listen(self._client, config.host, config.port, pages, what)
        batches.cancel()
        print(self.latencies(), flush=True)

    def latencies(self) -> str:
        """Returns quantiles of the latencies, and a bar for each power of two of milliseconds."""
        if not self._latencies:
            return "no request was answered"
        values = np.array(self._latencies) * 1e3
        (middle, high), most = np.quantile(values, [0.5, 0.99]), values.max()
        text = f"latency of {len(values)} requests: median {middle:.3g} ms, 99 % {high:.3g} ms, max {most:.3g} ms; "
        edges = 2.0 ** np.arange(np.floor(np.log2(values.min())), np.floor(np.log2(most)) + 2)
        counts = np.histogram(values, edges)[0]
        bars = [f"{n:>8} {'#' * int(np.ceil(_BAR * n / counts.max()))}".rstrip() for n in counts]
        lines = [f"{low:>10g} - {2 * low:<6g} ms {bar}" for low, bar in zip(edges, bars, strict=False)]
        return "\n".join([f"{text}{self._num_rows} rows in {self._num_calls} policy calls", *lines])

    def _metadata(self) -> dict[str, Any]:
        spec = self._policy.spec
        conditions = json.loads((Path(self._config.checkpoint) / CONDITIONS).read_text(encoding="utf-8"))
        return {
            "policy": spec.name,
            "observation": [str(feature) for feature in self._env.features],
            "actions": [spec.chunk, spec.action_dim],
            OURS: {"version": VERSION, "spec": asdict(spec), "trained_under": conditions},
        }

    async def _client(self, connection: ServerConnection) -> None:
        self._num_clients += 1
        request = connection.request
        try:
            await (self._vla_eval if request and request.path == VLA_EVAL else self._openpi)(connection)
        except ConnectionClosed:
            pass  # its client has left
        finally:
            self._num_clients -= 1

    async def _openpi(self, connection: ServerConnection) -> None:
        await connection.send(pack(self._metadata()))
        async for data in connection:
            answer = await self._answer(data)
            if not isinstance(answer, str):
                actions, timing = answer
                answer = pack({"actions": actions, "server_timing": timing})
            await connection.send(answer)

    async def _vla_eval(self, connection: ServerConnection) -> None:
        """Gives a client of vla-eval one action per observation: those of a chunk that are executed, in order."""
        left, spec, views = deque[np.ndarray](), self._policy.spec, self._env.cameras
        wants = {"send_wrist_image": len(views) > 1, "send_state": self._env.proprio_dim > 0}
        own = {**VLA_EVAL_HELLO, "model_server": spec.name, "capabilities": {}}
        async for data in connection:
            message = unpack(data)
            kind, shown, number = message.get("type"), dict(message.get("payload") or {}), message.get("seq", 0)
            if kind == "hello":
                hello = {**own, "observation_params": {name: True for name, needed in wants.items() if needed}}
                await connection.send(pack_vla_eval("hello", hello, number))
            elif kind == "episode_start":
                left.clear()
            elif kind == "observation":
                images, found = shown.get("images"), None
                if isinstance(images, dict) and not self._keys and not {*images} & {*views}:  # by their order
                    shown["images"] = dict(zip(views, images.values(), strict=False))
                if not left:
                    found = await self._answer(shown)
                    left.extend(() if isinstance(found, str) else found[0][: self._trained.env.executed])
                kind, answer = ("error", {"error": found}) if not left else ("action", {"actions": left.popleft()})
                await connection.send(pack_vla_eval(kind, answer, number))

    async def _answer(self, data: bytes | str | dict[str, Any]) -> _Answer | str:
        """Returns what the policy does, or what is wrong with a request."""
        start = time.perf_counter()
        try:
            message = data if isinstance(data, dict) else unpack(data)
            observation = observation_of(message, self._env, self._keys, self._config.prompt)
            if OURS in message:
                actions, timing = await self._call([observation], message[OURS])
            else:
                answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
                self._queue.put_nowait((observation, answer))
                actions, timing = await answer
            self._latencies.append(time.perf_counter() - start)
            return actions, {**timing, "total_ms": self._latencies[-1] * 1e3}
        except ServerError as error:
            return str(error)
        except Exception as error:  # whatever a policy raises ends no server
            log.warning("a request failed", exc_info=error)
            return f"{type(error).__name__}: {error}"

    async def _answer_batches(self) -> None:
        while True:
            batch, most = [await self._queue.get()], self._config.max_batch
            if self._queue.qsize() + 1 < min(self._num_clients, most):
                await asyncio.sleep(self._config.wait_ms / 1e3)
            while len(batch) < most and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._answer_batch(batch)

    async def _answer_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            actions, timing = await self._call([observation for observation, _ in batch])
        except Exception as error:  # noqa: BLE001 - its client gets it
            for waiting in batch if len(batch) > 1 else ():  # of several only one may be to blame
                await self._answer_batch([waiting])
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            return
        for row, (_, answer) in enumerate(batch):
            answer.set_result((actions[row], timing))

    async def _call(self, parts: Sequence[Observation], asked: dict[str, Any] | None = None) -> _Answer:
        start = time.perf_counter()
        actions = await asyncio.get_running_loop().run_in_executor(self._thread, self._act, parts, asked)
        self._num_calls, self._num_rows = self._num_calls + 1, self._num_rows + len(actions)
        return actions, {"infer_ms": (time.perf_counter() - start) * 1e3, "rows": len(actions)}

    @torch.no_grad()
    def _act(self, parts: Sequence[Observation], asked: dict[str, Any] | None) -> np.ndarray:
        """Returns actions float32 [B, C, A]: greedy ones, or those of the noise and temperature that are asked for."""
        if self._alone:
            torch.set_num_threads(1)  # as a worker
        if any(part.privileged is None for part in parts):
            parts = [replace(part, privileged=None) for part in parts]
        settings, spec, noise = self._trained.policy, self._policy.spec, None
        observation = Observation.concatenate(parts).prompted(settings.prompt_suffix)
        temperature = settings.temperature
        if asked is not None:
            given, temperature = asked["noise"], asked["temperature"]
            noise = None if given is None else torch.from_numpy(given.copy())
        elif spec.greedy_noise is not None:
            numbers = self._num_drawn + np.arange(len(observation))
            noise, temperature = spec.greedy_noise.draw(self._config.run.seed, "serve", numbers), 0.0
            self._num_drawn += len(observation)
        features = self._policy.encode(observation.to(self._device))
        output = self._policy.act(features, None if noise is None else noise.to(self._device), temperature)
        return output.actions.float().cpu().numpy()


def remote_policy(remote: RemoteConfig, env: EnvConfig) -> TrainedUnder:
    """Returns the section `policy` that acts in an env through a server; no fingerprint if that is another project's.

    Raises:
        ConfigError: no policy server answers, or what it says cannot be read.
    """
    assert remote.url is not None
    with closing(PolicyClient(remote.url, remote.timeout_s)) as client:
        ours = client.ours
    policy, fingerprint = PolicyConfig(name="remote", critic=Critic.observation), {}
    try:
        if ours is not None:
            trained = conditions_in(ours["trained_under"])
            policy, fingerprint = trained.policy, trained.fingerprint
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        action = "use one version of this project for both"
        raise ConfigError(
            f"remote.url is {remote.url!r}, but its metadata cannot be read ({error!r}): {action}"
        ) from error
    options = asdict(replace(remote, chunk=env.chunk))
    policy = replace(policy, _target_="policies.remote.RemotePolicy", options=options)
    return TrainedUnder(env, policy, fingerprint, None, Precision.float32)
