"""vLLM as an engine: its server may be lost at any time.  What vLLM itself does needs its environment (foreign.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from math_runs import tiny_math
from runs import metric_rows, train

from policies.causal_lm import CausalLM
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig
from rlinf_embodied.errors import ConfigError, WorkerError
from rlinf_embodied.reasoning import vllm_engine
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt
from rlinf_embodied.reasoning.engine import Engine, Generated, update
from rlinf_embodied.reasoning.vllm_engine import VllmEngine, installed_python

SHAPE = LanguagePolicyConfig(
    hidden_size=32, num_layers=1, num_heads=1, intermediate_size=64
)  # heads of 32, which vLLM has
# a server that speaks the protocol: tokens count up from 2 plus a row's seed modulo 5, and 6 ends a row
STAND_IN = """
import json, os, select, sys
given, rows, paused = json.loads(sys.argv[1]), {}, False
version = given["version"]
if given["engine"].get("broken"):
    sys.exit("it is broken")
say = lambda **message: print(json.dumps(message), flush=True)
say(ready="0")
while True:
    while not (rows and not paused) or select.select([0], [], [], 0)[0]:
        line = b""
        while not line.endswith(b"\\n"):
            if not (byte := os.read(0, 1)):
                sys.exit()
            line += byte
        asked = json.loads(line)
        if asked["do"] == "submit":
            rows |= {row: [2 + seed % 5, most] for row, prompt, most, seed in asked["rows"]}
        elif asked["do"] == "abort":
            rows = {row: of for row, of in rows.items() if row not in asked["rows"]}
        elif asked["do"] == "load":
            version = asked["version"]
            say(loaded=version)
        else:
            paused = asked["do"] == "pause"
    made = []
    for row, of in rows.items():
        of[1] -= 1
        made.append([row, [of[0]], [-0.5], "stop" if of[0] == 6 else "length" if of[1] == 0 else ""])
        of[0] += 1
    rows = {row: of for (row, of), (*_, reason) in zip(rows.items(), made) if not reason}
    say(version=version, rows=made)
    if given["engine"].get("steps_then_dies"):
        print('{"version":', end="", flush=True)
        sys.exit(3)
"""


def config_of(**options: object) -> MathConfig:
    config = tiny_math("generation.engine=vllm", "run.exact=false", "generation.max_new_tokens=4")
    config.generation.engine_options = options
    return config


def engine_of(policy: CausalLM, **options: object) -> VllmEngine:
    return VllmEngine(config_of(**options), policy, 3, command=[sys.executable, "-c", STAND_IN])


def requests(policy: CausalLM, config: MathConfig) -> GenerationBlock:
    encode = lambda text: tuple(policy.codec.encode_chat(policy.codec.chat(text)))  # noqa: E731
    prompts = tuple(Prompt(k, encode(f"{k}+4="), sample) for k in range(3) for sample in (0, 1))
    return GenerationBlock(prompts, config.generation, 9, 2)


def ended(engine: Engine) -> list[Generated]:
    rows: list[Generated] = []
    while any(engine.stats()):
        rows += engine.poll()
    return sorted(rows, key=lambda row: row.row)


def wait_for_tokens(engine: VllmEngine) -> None:
    while not any(row.generated.tokens for row in engine._rows.values()):
        engine._receive(0.5)  # as `poll`, which would hand rows over


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    return CausalLM.from_config(SHAPE, None, 5)


def test_rows_begin_again_in_another_server_where_one_is_lost(policy) -> None:
    whole, lost = engine_of(policy), engine_of(policy)
    block = requests(policy, config_of())
    assert isinstance(whole, Engine)
    for engine in (whole, lost):
        assert engine.submit(block) == list(range(6))
    wait_for_tokens(lost)
    os.kill(lost._server.pid, signal.SIGKILL)
    for engine in (whole, lost):
        rows = [(r.row, r.tokens, r.ended, r.versions) for r in ended(engine)]
        assert [r[1] for r in rows] == [[*range(t[0], t[0] + len(t))] for t in (r[1] for r in rows)]
        assert all(r[2] == (r[1][-1] == 6) and r[3] == [3] * len(r[1]) for r in rows)
        assert len({r[1][0] for r in rows}) > 1  # seeds differ by row
        engine.close()
        assert not engine._folder.exists()


def test_rows_under_way_stay_while_it_pauses_and_weights_change(policy) -> None:
    engine = engine_of(policy)
    engine.submit(requests(policy, config_of()))
    wait_for_tokens(engine)
    engine.pause()
    assert engine.poll() == []
    os.kill(engine._server.pid, signal.SIGKILL)  # also with no server to hear of it
    update(engine, 4, policy)
    engine.submit(requests(policy, config_of()))
    rows = ended(engine)
    assert len(rows) == 12
    assert all(row.versions == [4] * len(row.tokens) for row in rows[6:])
    assert all(row.versions[0] in (3, 4) for row in rows[:6])  # some had ended
    assert all(len(set(row.versions)) == 1 for row in rows)  # what was lost begins again
    engine.close()


def test_a_server_that_cannot_start_or_work_shows_its_log(policy) -> None:
    with pytest.raises(ConfigError, match=r"(?s)generation.engine is vllm.*exit code 1.*engine_options.*it is broken"):
        engine_of(policy, broken=True)
    dying = engine_of(policy, steps_then_dies=True)
    dying.submit(requests(policy, config_of()))
    with pytest.raises(WorkerError, match=r"ended 4 times in a row \(exit code 3\)"):
        ended(dying)
    dying.close()


def test_a_missing_environment_and_settings_that_it_cannot_have_are_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_VLLM", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"none does not exist: install it with `python -m experiments.setup.foreign"):
        installed_python()
    for setting, error in (
        ("run.exact=portable", "the same bits"),
        ("generation.top_p=0.9", "could have been"),
        ("generation.engine_options={tensor_parallel_size: 2}", "the plan has to know it: use generation.tensor"),
    ):
        with pytest.raises(ConfigError, match=error):
            tiny_math("generation.engine=vllm", "run.exact=false", setting)


ENDLESS = """
import time
__version__, EngineArgs = "0", dict
class LLMEngine:
    from_engine_args = classmethod(lambda cls, settings: cls())
    has_unfinished_requests = lambda self: True
    def step(self):
        time.sleep(0.01)
        return []
"""


def test_the_server_of_an_owner_that_was_killed_ends_and_removes_its_folder(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(ENDLESS)
    (tmp_path / "vllm/sampling_params.py").write_text("RequestOutputKind = SamplingParams = None")
    (tmp_path / "folder/model").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = {"version": 0, "sampling": {"logit_bias": {}}, "engine": {"model": str(tmp_path / "folder/model")}}
    command = [sys.executable, vllm_engine._SERVER, json.dumps(given)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    assert json.loads(server.stdout.readline()) == {"ready": "0"}
    server.stdout.close()  # while it writes
    server.stdin.write(b'{"do": "abo')  # as it was writing
    server.stdin.close()
    assert server.wait(timeout=60) == 0
    assert not (tmp_path / "folder").exists()


# ------------------------------------------------------------------------------------------------------- the real vLLM
@pytest.fixture
def vllm_python() -> Path:
    try:
        return installed_python()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # vLLM starts twice
def test_tensor_parallelism_gives_the_same_tokens_also_after_new_weights(vllm_python) -> None:
    first, second = (CausalLM.from_config(replace(SHAPE, hidden_size=64, num_heads=2), None, n) for n in (5, 6))
    generated = []
    for size in (1, 2):
        config = config_of(enforce_eager=True)
        engine = VllmEngine(config, first, 3, ("cpu",) * size)
        engine.submit(requests(first, config))
        rows = ended(engine)
        update(engine, 4, second)
        engine.submit(requests(first, config))
        generated.append([*rows, *ended(engine)])
        engine.close()
    for one, two in zip(*generated, strict=True):
        assert one.tokens == two.tokens
        assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # vLLM starts for each run of the profile
def test_the_plan_puts_a_vllm_engine_on_two_devices(tmp_path: Path, vllm_python) -> None:
    overrides = ["generation.engine=vllm", "generation.tensor_parallel_size=2", "run.exact=false", "cluster=local"]
    overrides += ["generation.engine_options={enforce_eager: true}", "policy.hidden_size=64", "eval.num_samples=0"]
    config = tiny_math(*overrides, "plan=auto", "cluster.num_devices=2", f"run.dir={tmp_path}")
    assert train(config)["iterations"] == 3
    plan = json.loads((tmp_path / "plan.json").read_text())
    print(plan["items"])
    assert any("generation on 0-1" in item for item in plan["items"])
    assert max(row["losses/mismatch_max"] for row in metric_rows(tmp_path)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)  # vLLM starts twice
def test_a_training_with_vllm_survives_the_end_of_its_server(monkeypatch, tmp_path: Path, vllm_python) -> None:
    load, killed = VllmEngine.load, []

    def load_and_die(self: VllmEngine, version: int, policy: CausalLM) -> None:
        load(self, version, policy)
        if version == 5:
            killed.append(self._server.pid)
            os.kill(self._server.pid, signal.SIGKILL)

    monkeypatch.setattr(VllmEngine, "load", load_and_die)
    overrides = ["policy.num_heads=1", "generation.engine=vllm", "run.exact=false", "run.num_iterations=10"]
    config = tiny_math(*overrides, "generation.engine_options={enforce_eager: true}", "eval.num_samples=0")
    config.run.dir = str(tmp_path)
    assert train(config)["iterations"] == 10
    assert len(killed) == 1
    mismatches = [row["losses/mismatch_max"] for row in metric_rows(tmp_path)]
    print("largest differences of log-probs", mismatches)  # the head is tied to the embeddings, which change, too
    assert len(mismatches) == 10
    assert max(mismatches) < 1e-5
