"""Envs in servers elsewhere: real processes of serve_env.py, a network that loses messages, a stand-in robot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from robot_stand_in import RATE_HZ
from runs import clone, tiny
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import serve

from envs import point_reach, remote
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import VectorEnv

POINT = EnvConfig(
    _target_="envs.point_reach.make_env",
    task="PointReach-v0",
    num_envs=3,
    block_size=3,
    horizon=8,
    chunk=4,
    obs_size=16,
    cameras=["a", "b"],
    hold_steps=1,
)


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Within it a process serves an env: the process and its url."""
    command = [sys.executable, "-u", str(REPOSITORY / "experiments/serve_env.py"), *words, "port=0"]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=environment
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.stdout.read()
    try:
        yield process, line.split("env.options.url=")[1].split()[0]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def point() -> Iterator[str]:
    with serving("env=point_reach") as (_, url):
        yield url


@contextmanager
def lossy(url: str) -> Iterator[tuple[str, list[int]]]:
    """Within it a network that loses every fifth answer, and breaks the connection at every 13th message: its url."""
    seen = [0, 0]  # questions, answers

    def relay(connection: Any) -> None:
        with connect(url, compression=None, max_size=None) as beyond, suppress(ConnectionClosed):
            for question in connection:
                seen[0] += 1
                beyond.send(question)
                answer = beyond.recv()
                seen[1] += 1
                if seen[1] % 13 == 0:
                    return
                if seen[1] % 5:
                    connection.send(answer)

    with serve(relay, "127.0.0.1", 0, compression=None, max_size=None) as listening:
        threading.Thread(target=listening.serve_forever).start()
        yield f"ws://127.0.0.1:{listening.socket.getsockname()[1]}", seen
        listening.shutdown()


def elsewhere(url: str, config: EnvConfig = POINT, **options: Any) -> EnvConfig:
    return replace(config, _target_="envs.remote.make_env", options={"url": url, **options})


def trace(env: VectorEnv) -> list[Any]:
    """Returns all that chunks of random and expert actions give, with partial resets."""
    draw, found = torch.Generator().manual_seed(0), [env.reset([1, 2, 3])]
    for k in range(6):
        drawn = torch.rand(3, 4, 2, generator=draw) - 0.5
        actions = env.expert_actions()[:, None].expand(-1, 4, -1) if k % 2 else drawn
        found.append(env.step_chunk(actions, [10 * k, 10 * k + 1, 10 * k + 2]))
    env.record([1], 20)
    found += [env.step_chunk(torch.zeros(3, 4, 2)), env.take_frames(), env.state(), env.object_positions(), env.spec]
    return found


def test_a_network_that_loses_messages_changes_no_bit_and_repeats_no_step(point: str) -> None:
    here = point_reach.make_env(POINT, 3, render_final=True)
    with lossy(point) as (url, seen):
        there = remote.make_env(elsewhere(url, timeout_s=0.1), 3, render_final=True)
        torch.testing.assert_close([*_leaves(trace(there))], [*_leaves(trace(here))], rtol=0, atol=0)
        there.close()
    assert seen[0] > 50


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors in dataclasses, dicts and lists, and what else they hold as text."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _leaves([*value.items()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _leaves([getattr(value, name) for name in value.__dataclass_fields__])
    elif value is not None:
        yield torch.tensor([*str(value).encode()])


def test_a_checkpoints_episodes_are_the_same_in_a_served_env(point: str, tmp_path: Path) -> None:
    words = [f"checkpoint={clone(tiny('policy=flow_vla'))}", "cluster=serial", "eval.num_envs=4", "eval.num_episodes=6"]
    env = ["env.task=PointReach-v0", "env.cameras=[base_camera]", "env.obs_size=16", "env.chunk=4", "env.horizon=12"]
    there = [*env, "env=remote", f"env.options.url={point}", "env.hold_steps=1"]
    for name, more in (("here", []), ("there", there)):
        evaluate_command(compose_evaluate([*words, f"run.dir={tmp_path / name}", "eval.record_video=false", *more]))
    assert (tmp_path / "here/episodes.csv").read_bytes() == (tmp_path / "there/episodes.csv").read_bytes()


def test_a_server_of_another_protocol_version_is_refused(point: str, monkeypatch) -> None:
    monkeypatch.setattr(remote, "VERSION", 0)
    with pytest.raises(SimulatorError, match=r"it speaks protocol version 1, and not 0: use the same version of rlinf"):
        remote.make_env(elsewhere(point), 3)


def test_a_robot_keeps_its_rate_and_its_emergency_stop_ends_the_run(tmp_path: Path) -> None:
    (robot := tmp_path / "robot.yaml").write_text(
        "_target_: robot_stand_in.make_env\ntask: Lift\ncameras: []\ncontrol_hz: 50\nhorizon: 10\nchunk: 2\n"
    )
    config = replace(POINT, task="Lift", cameras=[], num_envs=1, block_size=1, horizon=10, chunk=2, control_hz=RATE_HZ)
    with serving(f"env={robot}") as (process, url):
        with pytest.raises(ConfigError, match=r"env.control_hz is 20.0, but arm takes 50 steps per second: use env"):
            remote.make_env(elsewhere(url, replace(config, control_hz=20.0)), 1)
        with pytest.raises(SimulatorError, match=r"it serves Lift, and not Push: use env.task=Lift"):
            remote.make_env(elsewhere(url, replace(config, task="Push")), 1)
        env = remote.make_env(elsewhere(url, config, timeout_s=1.0, retries=1), 1)
        env.reset([0])
        start = time.monotonic()
        for _ in range(3):
            env.step_chunk(torch.full((1, 2, 1), 0.1))
        assert time.monotonic() - start >= 5 / RATE_HZ
        stopped = r"ws://.* failed in 'step': emergency stop: clear .* release it \(fix that, then run the same"
        for _ in range(2):  # it stays stopped
            with pytest.raises(SimulatorError, match=stopped):
                env.step_chunk(torch.ones(1, 2, 1))
        process.send_signal(signal.SIGKILL)
        with pytest.raises(SimulatorError, match=r"the env server at ws://.* is gone \(.*'step' was sent 2 times\)"):
            env.step_chunk(torch.zeros(1, 2, 1))


def test_a_url_without_an_env_server_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env.options.url is 'ws://127.0.0.1:9', but no env server answers there"):
        remote.make_env(elsewhere("ws://127.0.0.1:9"), 1)
    with pytest.raises(ConfigError, match=r"env.options.url is 'http://a', but it names a websocket"):
        remote.make_env(elsewhere("http://a"), 1)

    def policy_server(connection: Any) -> None:
        connection.send("metadata")
        connection.recv()

    with serve(policy_server, "127.0.0.1", 0) as listening:
        threading.Thread(target=listening.serve_forever).start()
        url = f"ws://127.0.0.1:{listening.socket.getsockname()[1]}"
        with pytest.raises(SimulatorError, match=rf"the server at {url} speaks another protocol .*: give the url of"):
            remote.make_env(elsewhere(url), 1)
        listening.shutdown()
