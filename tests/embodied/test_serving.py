"""A checkpoint behind openpi's and vla-eval's protocols, and such servers as the policy of an evaluation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import openvla_folders
import pytest
from conftest import REPOSITORY
from runs import clone, tiny
from websockets.sync.client import connect
from websockets.sync.server import serve

from envs.foreign.adapter import folder_of
from experiments.examples.small_pi import Options, write_small
from rlinf_embodied.compose import compose_evaluate, compose_export
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.errors import CheckpointError, ConfigError, ServerError
from rlinf_embodied.interfaces.envs import EnvSpec, features_of
from rlinf_embodied.interfaces.serving import OURS, PolicyClient, observation_of, pack, pack_vla_eval, unpack
from rlinf_embodied.plug_ins import load_target

SMALL = ["cluster=serial", "eval.num_envs=4", "eval.num_episodes=6", "eval.record_video=false"]
ENV = ["env=point_reach", "env.obs_size=16", "env.chunk=4", "env.horizon=12", "env.block_size=4"]
IMAGE = np.zeros((16, 16, 3), np.uint8)
SEEN = {"observation/image": IMAGE, "observation/state": np.zeros(4), "prompt": "reach"}  # as openpi's LIBERO has it


class WireFormat:
    """openpi-client 0.1.2 in twenty lines: it asks for numpy < 2, so that no test environment here can have it."""

    def __init__(self, url: str) -> None:
        self._socket = connect(url, compression=None, max_size=None)
        self._metadata = self._unpack(self._socket.recv())

    def get_server_metadata(self) -> dict[str, Any]:
        return self._metadata

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        as_bytes = lambda a: {b"__ndarray__": True, b"data": a.tobytes(), b"dtype": a.dtype.str, b"shape": a.shape}  # noqa: E731
        self._socket.send(msgpack.Packer(default=as_bytes).pack(obs))
        response = self._socket.recv()
        if isinstance(response, str):
            raise RuntimeError(f"Error in inference server:\n{response}")
        return self._unpack(response)

    def _unpack(self, data: bytes | str) -> dict[str, Any]:
        array = lambda o: np.ndarray(o[b"shape"], np.dtype(o[b"dtype"]), o[b"data"]) if b"__ndarray__" in o else o  # noqa: E731
        return msgpack.unpackb(data, object_hook=array)


def client(url: str) -> Any:
    """Returns the client of PyPI where it is installed."""
    try:
        from openpi_client.websocket_client_policy import WebsocketClientPolicy
    except ImportError:
        return WireFormat(url)
    return WebsocketClientPolicy(url)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """Within it a process serves a checkpoint: the process, its url and the checkpoint."""
    words = [f"checkpoint={folder}", "port=0", "wait_ms=500"]
    command = [sys.executable, "-u", str(REPOSITORY / "experiments/serve_policy.py"), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.stdout.read()
    try:
        yield process, line.split(" at ")[1].split()[0], folder
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A process that serves a flow policy."""
    with serving(clone(tiny("policy=flow_vla"))) as process:
        yield process


def written_by_others(kind: str, place: Path) -> Path:
    """Returns a checkpoint of a tiny pi0 or OpenVLA, made from a folder as its authors publish it."""
    env = compose_evaluate(["policy=expert", *ENV]).env
    if kind == "pi0":
        small = {"out": str(place / "published"), "action_dim": 2, "proprio_dim": 4, "chunk": 4, "hidden_size": 16}
        source, target, options = write_small(Options(**small)), "policies.pi.policy.PiPolicy", {}
    else:
        source = openvla_folders.write_published(place / "published", action=2, proprio=4)
        target, options = "policies.openvla.policy.OpenVLAPolicy", {"decoding": "parallel", "prompt_length": 24}
    config = PolicyConfig(_target_=target, name=kind, options=options)
    made = load_target(target).from_folder(source, make_env(env, 1, "cpu").spec, config)
    save_policy(made, place / "checkpoint", env, config)
    return place / "checkpoint"


@contextmanager
def server(answer: Callable[[dict[str, Any]], bytes | str | None], greeting: bytes = pack({})) -> Iterator[str]:
    """Within it another project's server answers requests unless `answer` returns b"", and hangs up at None."""

    def handle(connection: Any) -> None:
        if greeting:
            connection.send(greeting)
        for data in connection:
            found = answer(unpack(data))
            if found is None:
                return
            if found:
                connection.send(found)

    with serve(handle, "127.0.0.1", 0, compression=None) as listening:
        threading.Thread(target=listening.serve_forever).start()
        yield f"ws://127.0.0.1:{listening.socket.getsockname()[1]}"
        listening.shutdown()


def evaluate(folder: Path, *words: str) -> list[dict]:
    evaluate_command(compose_evaluate([*SMALL, f"run.dir={folder}", *words]))
    return json.loads((folder / "eval_info.json").read_text())["episodes"]


# ------------------------------------------------------------------------------------------------------ a real process
def test_episodes_are_the_same_here_and_through_a_server(served, tmp_path: Path) -> None:
    _, url, folder = served
    both = ["eval.sampled_episodes=2", f"checkpoint={folder}"]
    here = evaluate(tmp_path / "here", *both)
    there = evaluate(tmp_path / "there", *both, "policy=remote", f"remote.url={url}")
    assert here == there
    assert (tmp_path / "here/episodes.csv").read_bytes() == (tmp_path / "there/episodes.csv").read_bytes()
    with pytest.raises(CheckpointError, match=r"trained under other conditions.*horizon is 12 there and 8 here"):
        evaluate(tmp_path, "policy=remote", f"remote.url={url}", *ENV, "env.horizon=8")


@pytest.mark.parametrize("kind", ["pi0", "openvla"])
def test_episodes_of_published_models_are_the_same_here_and_through_a_server(kind: str, tmp_path: Path) -> None:
    folder = written_by_others(kind, tmp_path)
    with serving(folder) as (_, url, _):
        for place, words in (("here", []), ("there", ["policy=remote", f"remote.url={url}"])):
            evaluate(tmp_path / place, f"checkpoint={folder}", *words)
    assert (tmp_path / "here/episodes.csv").read_bytes() == (tmp_path / "there/episodes.csv").read_bytes()


def test_openpis_client_is_answered_and_learns_what_is_wrong(served) -> None:
    policy = client(served[1])
    assert policy.get_server_metadata()["actions"] == [4, 2]
    assert policy.infer(SEEN)["actions"].shape == (4, 2)
    for wrong, message in [
        (
            {"observation/image": None},
            r"observation.images.base_camera is object \[\], and the policy reads \[16, 16, 3\]",
        ),
        ({"observation/state": np.zeros(7)}, r"observation.state is float64 \[7\], and the policy reads \[4\]"),
        ({"observation/state": np.full(4, np.nan)}, "observation.state is not finite"),
        ({"prompt": 3}, "prompt is 3: send a text"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            policy.infer({**SEEN, **wrong})
    with pytest.raises(RuntimeError, match=r"observation.images.base_camera is missing, and the request has"):
        policy.infer({"state": np.zeros(4), "prompt": "reach"})
    assert policy.infer(SEEN)["server_timing"]["rows"] == 1  # the connection is as good as before


class VlaEvalWire:
    """vla_eval.connection.Connection of vla-eval 0.8.0 in a few lines, whose package is not installed here."""

    def __init__(self, url: str) -> None:
        self._socket, self._number = connect(url, compression=None, max_size=None), 0
        assert self.send("hello", {"harness_version": "0.8.0", "protocol_version": 1})["protocol_version"] == 1

    def send(self, kind: str, payload: dict, answered: bool = True) -> dict:
        self._number += 1
        named = lambda a: {"__ndarray__": True, "data": a.tobytes(), "dtype": a.dtype.str, "shape": a.shape}  # noqa: E731
        raw = {"type": kind, "payload": payload, "seq": self._number, "timestamp": 0.0}
        self._socket.send(msgpack.packb(raw, default=named))
        if not answered:
            return {}
        found = msgpack.unpackb(self._socket.recv())
        assert found["seq"] == self._number
        if found["type"] == "error":
            raise RuntimeError(f"Server error: {found['payload']}")
        return found["payload"]


def by_the_wire(url: str, shown: dict, steps: int) -> list[list[float]]:
    policy, taken = VlaEvalWire(url), []
    for _ in range(2):
        policy.send("episode_start", {"task": {"name": "reach"}}, answered=False)
        actions = [policy.send("observation", shown)["actions"] for _ in range(steps)]
        taken += [np.frombuffer(one["data"], one["dtype"]).tolist() for one in actions]
        policy.send("episode_end", {"metrics": {}}, answered=False)
    with pytest.raises(RuntimeError, match=r"Server error: .*base_camera is missing, and the request has"):
        policy.send("episode_start", {}, answered=False) or policy.send("observation", {"task_description": "reach"})
    return taken


def vla_evals_python() -> Path:
    """Returns the Python that has the package; skips the test if there is none."""
    python = folder_of("vla_eval") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: python -m experiments.setup.foreign env=vla_eval")
    return python


def by_its_package(url: str, shown: dict, steps: int) -> list[list[float]]:
    """What the unmodified client does, whose images are PNG."""
    script = f"""
import asyncio, json, numpy as np
from vla_eval.connection import Connection

async def run():
    shown, taken = {{"images": {{"agentview": np.zeros((16, 16, 3), np.uint8)}}, "states": np.zeros(4)}}, []
    connection = Connection({url!r})
    await connection.connect()
    for _ in range(2):
        await connection.start_episode({{"task": {{"name": "reach"}}}})
        acted = [await connection.act(shown | {{"task_description": "reach"}}) for _ in range({steps})]
        taken += [one["actions"].tolist() for one in acted]
        await connection.end_episode({{"metrics": {{}}}})
    await connection.close()
    print(json.dumps(taken))

asyncio.run(run())
"""
    found = subprocess.run([vla_evals_python(), "-P", "-c", script], check=True, capture_output=True, text=True, env={})
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def greedy() -> Iterator[str]:
    """The url of a policy that draws nothing: it does the same whenever it sees the same."""
    with serving(clone(tiny())) as (_, url, _):
        yield url


@pytest.mark.parametrize("ask", [by_the_wire, by_its_package])
def test_vla_evals_client_gets_the_actions_of_a_chunk_one_by_one(greedy: str, ask: Callable) -> None:
    chunk = client(greedy).infer(SEEN)["actions"].tolist()
    shown = {"images": {"agentview": IMAGE}, "states": np.zeros(4), "task_description": "reach"}
    assert ask(f"{greedy}/vla-eval", shown, 6) == 2 * [*chunk, *chunk[:2]]


def test_episodes_are_the_same_here_and_through_vla_evals_protocol(greedy: str, tmp_path: Path) -> None:
    both = [f"checkpoint={clone(tiny())}", "env.block_size=1"]  # a request has one row
    here = evaluate(tmp_path / "here", *both)
    assert here == evaluate(tmp_path / "there", *both, "policy=remote", f"remote.url={greedy}/vla-eval")
    assert (tmp_path / "here/episodes.csv").read_bytes() == (tmp_path / "there/episodes.csv").read_bytes()


def test_requests_that_arrive_together_are_one_policy_call(served) -> None:
    policies, start, rows = [client(served[1]) for _ in range(3)], threading.Barrier(3), []

    def ask(policy: Any) -> None:
        start.wait()
        rows.append(policy.infer(SEEN)["server_timing"]["rows"])

    threads = [threading.Thread(target=ask, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == [3, 3, 3]


def test_a_server_tells_its_health_and_latencies_and_ends_with_them(served) -> None:
    process, url, _ = served
    client(url).infer(SEEN)  # so that it has a latency
    page = lambda name: urllib.request.urlopen(f"{url.replace('ws', 'http', 1)}/{name}").read().decode()  # noqa: E731
    assert page("healthz") == "OK\n"
    assert "policy calls" in page("latency")
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert "median" in printed
    assert process.returncode == 0, printed


# ------------------------------------------------------------------------------------------------- servers of others
def test_a_server_of_another_project_acts_row_by_row_with_its_own_keys(tmp_path: Path) -> None:
    asked: list[dict] = []

    def zeros(request: dict) -> bytes:
        asked.append(request)
        return pack({"actions": np.zeros((10, 2))})

    with server(zeros) as url:
        remote = ["policy=remote", f"remote.url={url}", *ENV]
        keys = "remote.keys={observation/image: observation.images.base_camera, state: observation.state}"
        assert len(evaluate(tmp_path, *remote, keys)) == 6
        assert asked[0]["observation/image"].shape == (16, 16, 3)
        assert asked[0]["state"].shape == (4,)
        assert isinstance(asked[0]["prompt"], str)
        config = compose_export([*remote, "num_episodes=2", "successes_only=false", f"out={tmp_path / 'out'}"])
        assert export_dataset(config, lambda done, total: None)["written"] == 2
        with pytest.raises(ConfigError, match=r"remote.keys names 'wrist', but the env shows .*base_camera"):
            evaluate(tmp_path, *remote, "remote.keys={a: wrist}")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"the policy server at ws://.* is gone .*: start it again"),
        ("no such camera", r"the policy server at ws://.* refused an observation: no such camera"),
        (pack({"action": 1}), r"the policy server at ws://.* speaks another protocol"),
        (pack({"actions": np.zeros((2, 2))}), r"ws://.* returns 2 of env.chunk=4 actions: use env.chunk=2 or less"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(tmp_path: Path, answer: bytes | str | None, message: str) -> None:
    with server(lambda request: answer) as url, pytest.raises(ServerError, match=message):
        evaluate(tmp_path, "policy=remote", f"remote.url={url}", *ENV)


def vla_eval_server(
    kind: str, payload: dict, asked: list[dict], version: int = 1, late: int = 0
) -> Callable[[dict], bytes | None]:
    """Returns `answer` of a server of vla-eval; an empty payload hangs up."""

    def answer(message: dict) -> bytes | None:
        asked.append(message)
        if message["type"] == "hello":
            return pack_vla_eval("hello", {"protocol_version": version}, message["seq"])
        if message["type"] == "episode_start":
            return b""
        return pack_vla_eval(kind, payload, message["seq"] - late) if payload else None

    return answer


def test_a_server_of_vla_eval_gets_its_own_keys_and_may_return_whole_chunks(tmp_path: Path) -> None:
    asked: list[dict] = []
    with server(vla_eval_server("action", {"actions": np.zeros((10, 2))}, asked), b"") as url:
        keys = "remote.keys={agentview: observation.images.base_camera}"
        assert len(evaluate(tmp_path, "policy=remote", f"remote.url={url}/vla-eval", *ENV, keys)) == 6
    episodes = [message for message in asked if message["type"] != "hello"]
    assert [message["type"] for message in episodes] == ["episode_start", "observation"] * (len(episodes) // 2)
    shown = episodes[1]["payload"]
    assert {name: image.shape for name, image in shown["images"].items()} == {"agentview": (16, 16, 3)}
    assert shown["states"].shape == (4,)
    assert isinstance(shown["task_description"], str)


@pytest.mark.parametrize(
    ("kind", "payload", "late", "message"),
    [
        ("action", {}, 0, r"the policy server at ws://.* is gone .*: start it again"),
        ("error", {"error": "no such camera"}, 0, r"ws://.* refused an observation: .*no such camera"),
        ("action", {"action": 1}, 0, r"the policy server at ws://.* speaks another protocol"),
        ("action", {"actions": np.zeros(2)}, 1, r"the policy server at ws://.* speaks another protocol"),
        ("action", {"actions": np.zeros((2, 2))}, 0, r"ws://.* returns 2 of env.chunk=4 actions: use env.chunk=2"),
    ],
)
def test_a_server_of_vla_eval_that_cannot_be_used_is_named(
    tmp_path: Path, kind: str, payload: dict, late: int, message: str
) -> None:
    answer = vla_eval_server(kind, payload, [], late=late)
    with server(answer, b"") as url, pytest.raises(ServerError, match=message):
        evaluate(tmp_path, "policy=remote", f"remote.url={url}/vla-eval", *ENV)


def test_another_version_of_vla_evals_protocol_is_refused() -> None:
    rule = r"remote.url is 'ws://.*/vla-eval', but .*protocol_version of vla-eval's hello is "
    answer = vla_eval_server("action", {}, [], version=2)
    with server(answer, b"") as url, pytest.raises(ConfigError, match=f"{rule}2, and not 1"):
        PolicyClient(f"{url}/vla-eval", 10.0)
    with server(answer) as url, pytest.raises(ConfigError, match=f"{rule}None, and not 1"):  # one of openpi
        PolicyClient(f"{url}/vla-eval", 10.0)


@pytest.mark.parametrize("size", [4, None])
def test_the_server_of_vla_evals_package_begins_a_chunk_with_each_call(size: int | None) -> None:
    script = f"""
import anyio, numpy as np
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import serve_async

class Server(PredictModelServer):
    def predict(self, obs, ctx):
        assert obs["images"]["agentview"].shape == (16, 16, 3) and obs["task_description"] == "reach"
        return {{"actions": np.arange(12).reshape(6, 2) + obs["states"][:2]}}

async def run():
    async with anyio.create_task_group() as group:
        server = Server(chunk_size={size})
        server.get_action_spec = server.get_observation_spec = dict
        print(await group.start(serve_async, server, "127.0.0.1", 0), flush=True)

anyio.run(run)
"""
    request = {"agentview": IMAGE, "observation.state": np.full(4, 0.5), "prompt": "reach"}
    with subprocess.Popen(
        [vla_evals_python(), "-P", "-c", script], stdout=subprocess.PIPE, text=True, env={}
    ) as process:
        assert process.stdout is not None
        try:
            policy = PolicyClient(f"ws://127.0.0.1:{int(process.stdout.readline())}/vla-eval", 30.0)
            for chunk in (3, 4, 4):
                assert policy.infer(request, chunk).tolist() == (np.arange(12).reshape(6, 2)[:chunk] + 0.5).tolist()
        finally:
            process.kill()


def test_a_url_without_a_policy_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"remote.url is 'ws://127.0.0.1:9', but no policy server answers there"):
        evaluate(tmp_path, "policy=remote", "remote.url=ws://127.0.0.1:9", *ENV)
    with server(lambda request: None, greeting=pack({OURS: {"version": 0}})) as url:
        refused = (
            r"no policy server answers there \(version 0 of the protocol, and not 1: use the same version of rlinf"
        )
        with pytest.raises(ConfigError, match=refused):
            PolicyClient(url, timeout_s=5.0)
    with pytest.raises(ConfigError, match=r"remote.url is 'http://a', but it names a websocket"):
        compose_evaluate(["policy=remote", "remote.url=http://a"])
    with pytest.raises(ConfigError, match=r"remote.url is None, but policy is .remote.: give"):
        compose_evaluate(["policy=remote"])


def test_observations_come_in_the_forms_of_lerobot_and_openpi() -> None:
    env = EnvSpec("task", 1, 4, 8, 2, features_of({"a": (2, 4), "b": (2, 4)}, {"x": 1, "y": 2}), "cpu")
    a = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    floats = {"observation.images.a": (a.transpose(2, 0, 1) + 0.5) / 255, "observation.images.b": a, "task": "go"}
    nested = {"images": {"a": a.transpose(2, 0, 1), "b": a}, "state": np.arange(3), "prompt": "go"}
    libero = {"observation/image": a, "observation/wrist_image": a, "observation/state": np.arange(3), "prompt": "go"}
    for message in ({**floats, "observation.state": np.arange(3)}, nested, libero):
        found = observation_of(message, env, {}, None)
        assert [image[0].tolist() for image in found.images.values()] == [a.tolist()] * 2
        assert {name: vector.tolist() for name, vector in found.state.items()} == {"x": [[0.0]], "y": [[1.0, 2.0]]}
        assert found.instruction == ("go",)
