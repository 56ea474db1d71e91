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
import torch
from math_runs import tiny_math
from runs import metric_rows, train

from policies.adapters import merged_model, plain_state, read_adapters
from policies.causal_lm import CausalLM
from policies.checkpoint_folder import read_tensors
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings, MathConfig, Precision
from rlinf_embodied.errors import ConfigError, WorkerError
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.reasoning import job, vllm_engine
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt
from rlinf_embodied.reasoning.engine import Engine, Generated, update
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.vllm_engine import VllmEngine, installed_python
from rlinf_embodied.runtime.session import find_cluster

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
    refused = {
        "run.exact=portable": "the same bits",
        "generation.top_p=0.9": "could have been",
        "generation.engine_options={tensor_parallel_size: 2}": "the plan has to know it: use generation.tensor",
        "policy.lora.rank=513": "policy.lora.rank is 513, but vLLM applies adapters of rank 512 or less",
    }
    for setting, error in refused.items():
        with pytest.raises(ConfigError, match=error):
            tiny_math("generation.engine=vllm", "run.exact=false", setting)
    monkeypatch.setattr(job, "installed_python", Path)
    monkeypatch.setattr(job, "find_cluster", lambda config: replace(find_cluster(config), kind="cuda"))
    config = tiny_math("generation.engine=vllm", "run.exact=false", "policy.lora.rank=4")
    with pytest.raises(ConfigError, match=r"policy\.precision is 'float32', but on GPUs vLLM's kernels for adapters"):
        job.ReasoningJob(config).require_checkpoint(None)


def adapted(seed: int, shape: LanguagePolicyConfig = SHAPE, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Returns a model whose base has a precision, with random adapters over it."""
    pytest.importorskip("peft", reason="needs the extra lora")
    policy = CausalLM.from_config(replace(shape, lora=LoraSettings(rank=4)), None, seed)
    policy.module.to(dtype)
    for parameter in policy.parameters():
        parameter.data = parameter.data.float()
    set_adapters(policy, seed, 0.2)
    return policy


def set_adapters(policy: CausalLM, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data.normal_(std=scale, generator=generator)


def adapted_config(temperature: float, precision: Precision = Precision.float32, **options: object) -> MathConfig:
    config = config_of(**options)
    config.generation.temperature, config.policy.precision = temperature, precision
    config.policy.lora = LoraSettings(rank=4)
    return config


def test_servers_get_adapters_unmerged_and_the_base_again_with_the_first_load_only(monkeypatch) -> None:
    policy = adapted(6)
    # a resumed run's first copy has another base
    engine = VllmEngine(adapted_config(1.0), adapted(5), 3, command=[sys.executable, "-c", STAND_IN])
    folders, send = [], engine._send

    def record(**message: object) -> None:
        folders.extend([message["folder"]] if message["do"] == "load" else [])
        send(**message)

    monkeypatch.setattr(engine, "_send", record)
    for version in (4, 5):
        set_adapters(policy, version, 0.1)
        update(engine, version, policy)
        state, plain = policy.module.state_dict(), plain_state(policy.module)
        adapters = read_adapters(engine._folder / "adapters")
        base = read_tensors(engine._folder / "model/model.safetensors")
        assert len(adapters) == len(policy.parameters())
        assert all(torch.equal(tensor, state[name]) for name, tensor in adapters.items())
        assert all(torch.equal(tensor, plain[name]) for name, tensor in base.items())
    assert folders == [str(engine._folder / "model"), None]
    engine.close()


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
    given = {
        "version": 0,
        "adapters": None,
        "sampling": {"logit_bias": {}},
        "engine": {"model": str(tmp_path / "folder/model")},
    }
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
def test_adapters_give_the_tokens_of_merged_weights_also_after_a_new_base_and_in_another_server(vllm_python) -> None:
    config = adapted_config(0.01, enforce_eager=True)  # greedy, with logits as large as a trained model's
    config.generation.max_new_tokens = 16
    first, second = adapted(11), adapted(10)  # other bases, as in a resumed run; no two tokens are about as likely
    for policy in (first, second):
        policy.model.get_input_embeddings().weight.data *= 50
    engine = VllmEngine(config, first, 3)

    def compare(policy: CausalLM) -> list[list[int]]:
        engine.submit(requests(policy, config))
        exact = ExactEngine(policy, engine.version)
        exact.submit(requests(policy, config))
        pairs = list(zip(ended(engine), ended(exact), strict=True))
        for one, other in pairs:
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)  # 1e-5 at a temperature of 1
        return [one.tokens for one, _ in pairs]

    tokens = [compare(first)]
    for version in (4, 5):
        set_adapters(second, version, 0.2)
        update(engine, version, second)
        tokens.append(compare(second))
    os.kill(engine._server.pid, signal.SIGKILL)
    assert compare(second) == tokens[2]
    assert tokens[0] != tokens[1] != tokens[2]
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_update_of_adapters_over_bfloat16_changes_log_probs_although_merging_would_lose_it(
    vllm_python,
) -> None:
    shape = replace(SHAPE, hidden_size=256, num_layers=2, num_heads=8, intermediate_size=512)
    policy = adapted(5, shape, torch.bfloat16)
    for name, parameter in policy.module.named_parameters():
        if name.endswith("base_layer.weight"):  # 0.046875, to which bfloat16 cannot add less than 2^-13
            parameter.data = parameter.data.sign() * 0.75 / 16
        elif "lora_B" in name:
            parameter.data.zero_()
        elif "lora_A" in name:
            parameter.data.uniform_(-1 / 16, 1 / 16, generator=torch.Generator().manual_seed(1))
    config = adapted_config(1.0, Precision.bfloat16, enforce_eager=True)
    config.generation.max_new_tokens = 32
    engine = VllmEngine(config, policy, 3)

    def generated() -> list[Generated]:
        engine.submit(block)
        return ended(engine)

    prompts = tuple(Prompt(0, requests(policy, config).prompts[0].tokens, sample) for sample in range(32))
    block = GenerationBlock(prompts, config.generation, 9, 2)
    before = generated()
    batch = TokenBatch.of([prompt.tokens for prompt in prompts], [row.tokens for row in before])
    log_probs = policy.log_probs(batch, 1.0, False).log_probs
    log_probs.sum().backward()
    plain = plain_state(policy.module)
    for name, parameter in policy.module.named_parameters():
        if "lora_B" in name:
            assert parameter.grad is not None
            parameter.data = 5e-5 * parameter.grad.sign()  # the first step of Adam
    assert all(torch.equal(tensor, plain[name]) for name, tensor in merged_model(policy.model).state_dict().items())
    expected = (policy.log_probs(batch, 1.0, False).log_probs - log_probs).detach()
    update(engine, 4, policy)
    changes = [
        (new - old, expected[row, step].item())
        for row, (one, other) in enumerate(zip(before, generated(), strict=True))
        for step, (old, new) in enumerate(zip(one.log_probs, other.log_probs, strict=False))
        if one.tokens[: step + 1] == other.tokens[: step + 1]
    ]
    vllm, transformers = (sum(column) / len(changes) for column in zip(*changes, strict=True))
    print(f"mean change of {len(changes)} log-probs: vLLM {vllm:.6f}, transformers {transformers:.6f}")
    assert transformers > 5e-4
    assert vllm == pytest.approx(transformers, rel=0.3)
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # vLLM starts twice
@pytest.mark.parametrize("rank", [0, 4])
def test_a_training_with_vllm_survives_the_end_of_its_server(monkeypatch, tmp_path: Path, vllm_python, rank) -> None:
    load, killed = VllmEngine.load, []

    def load_and_die(self: VllmEngine, version: int, policy: CausalLM) -> None:
        load(self, version, policy)
        if version == 5:
            killed.append(self._server.pid)
            os.kill(self._server.pid, signal.SIGKILL)

    monkeypatch.setattr(VllmEngine, "load", load_and_die)
    overrides = ["policy.num_heads=1", "generation.engine=vllm", "run.exact=false", "run.num_iterations=10"]
    config = tiny_math(
        *overrides, f"policy.lora.rank={rank}", "generation.engine_options={enforce_eager: true}", "eval.num_samples=0"
    )
    config.run.dir = str(tmp_path)
    assert train(config)["iterations"] == 10
    assert len(killed) == 1
    mismatches = [row["losses/mismatch_max"] for row in metric_rows(tmp_path)]
    print("largest differences of log-probs", mismatches)  # the head is tied to the embeddings, which change, too
    assert len(mismatches) == 10
    assert max(mismatches) < 1e-5
