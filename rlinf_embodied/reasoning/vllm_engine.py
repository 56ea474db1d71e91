"""vLLM as the engine of generation: a server process in a separate Python environment.

    VllmEngine --submit, abort, pause, load, resume--> vllm_server.py      one line of JSON each
               <--new tokens, log-probs, version------                     after each step of the server

Weights are passed in a model folder on this machine, which is rewritten for each version.  With adapters only these
are: vLLM applies them next to the weights, in policy.precision.  A server that ends is replaced by one with the newest
weights, and unfinished rows start again with their seeds.  Log-probs are those of vLLM's kernels, at the temperature;
training corrects for the difference by algorithm.tis_cap.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_embodied.config import MathConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError, WorkerError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.randomness import words
from rlinf_embodied.reasoning.batch import GenerationBlock
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.telemetry.progress import report_progress

_LOG = logging.getLogger(__name__)
_SERVER = Path(__file__).with_name("vllm_server.py")
_FOLDER = "RLINF_EMBODIED_VLLM"  # environment variable: folder of vLLM's Python environment
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # vllm_server.py sends a function to the workers of tensor parallelism
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
_OF_SEVERAL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise vLLM wants a NUMA node for each of its processes
_WAIT_S = 0.5  # longest time that `poll` waits for a step of the server
_MOST_LOSSES = 3  # consecutive servers that ended before any of their rows did
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's buffers for adapters, which may have smaller ones
_EXCLUDED = -100.0  # logit bias of a token that is never sampled


def installed_python() -> Path:
    """Returns the Python of vLLM's environment.

    Raises:
        ConfigError: it is not installed.
    """
    folder = Path(os.environ.get(_FOLDER) or Path(__file__).resolve().parents[2] / ".venv-vllm").absolute()
    python, rule = folder / "bin" / "python", f"vLLM needs a separate environment, and {folder} does not exist"
    action = f"install it with `python -m experiments.setup.foreign env=vllm`, or set {_FOLDER} to its folder"
    require(python.exists(), "generation.engine", "vllm", rule, action)
    return python


@dataclass(slots=True)
class _Row:
    """A request, and the tokens sampled so far."""

    prompt: list[int]
    max_tokens: int
    seed: int
    generated: Generated
    is_over: bool = False


class VllmEngine:
    """The server process and its rows; Engine in engine.py is the protocol."""

    def __init__(
        self,
        config: MathConfig,
        policy: LanguagePolicy,
        version: int,
        devices: Sequence[str] = ("cpu",),
        command: Sequence[str] | None = None,
    ) -> None:
        """Starts a server on these devices by a command (None: vLLM's), and waits until it is ready."""
        self.version, self._spec, self._config = version, policy.spec, config
        self._command = command or (str(installed_python()), "-P", str(_SERVER))
        self._devices = devices
        self._folder = Path(tempfile.mkdtemp(prefix="rlinf-vllm-"))
        self._rows: dict[int, _Row] = {}
        self._paused, self._next_number, self._losses = False, 0, 0
        self._adapters = self._folder / "adapters" if config.policy.lora.rank else None
        # until the first load, since a resumed run starts with merged adapters (LanguageLearner.sends_frozen)
        self._sends_base = True
        self._write(policy)
        self._start()
        try:
            self._wait()  # otherwise profiles and the first iteration would include the start
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------------------------------------------------- requests
    def submit(self, requests: GenerationBlock) -> list[int]:
        numbers = []
        for prompt in requests.prompts:
            max_tokens = requests.sampling.max_new_tokens if prompt.room is None else prompt.room
            key = requests.iteration, prompt.id, prompt.sample, prompt.place
            seed = int(words(requests.seed, requests.purpose, *key)) >> 2  # vLLM's seeds have 63 bits
            numbers.append(self._next_number)
            self._rows[self._next_number] = _Row(list(prompt.tokens), max_tokens, seed, Generated(self._next_number))
            self._next_number += 1
        self._submit(numbers)
        return numbers

    def _submit(self, numbers: Collection[int]) -> None:
        rows = [(number, self._rows[number]) for number in numbers]
        self._send(do="submit", rows=[[number, row.prompt, row.max_tokens, row.seed] for number, row in rows])

    def poll(self) -> list[Generated]:
        if self._paused or not self._rows:
            return []
        self._receive(_WAIT_S)
        while not self._inbox.empty():
            self._receive(0)
        return self._pop([number for number, row in self._rows.items() if row.is_over])

    def abort(self, rows: Collection[int]) -> list[Generated]:
        numbers = [number for number in self._rows if number in rows]
        if numbers:
            self._send(do="abort", rows=numbers)
        return self._pop(numbers)

    def pause(self) -> None:
        self._paused = True
        self._send(do="pause")

    def resume(self) -> None:
        self._paused = False
        self._send(do="resume")

    def load(self, version: int, policy: LanguagePolicy) -> None:
        """Loads a policy's current weights; waits until the server has them.

        Raises:
            WorkerError: too many servers ended.
        """
        self._wait()  # a starting server reads the folder
        self._write(policy)
        self.version, self._loaded = version, False
        self._send(do="load", folder=str(self._folder / "model") if self._sends_base else None, version=version)
        while not self._loaded:
            self._receive(_WAIT_S)
        self._sends_base = self._adapters is None

    def _write(self, policy: LanguagePolicy) -> None:
        """Writes the folders that a server reads; its files are new ones, since vLLM may map the old ones."""
        new = self._folder / "new"
        if self._sends_base:
            with policy.without_adapters():
                policy.save(new)
            shutil.rmtree(self._folder / "model", ignore_errors=True)
            new.rename(self._folder / "model")
        if self._adapters is not None:
            policy.save_adapters(new)
            shutil.rmtree(self._adapters, ignore_errors=True)
            new.rename(self._adapters)

    def stats(self) -> tuple[int, int]:
        decoding = sum(bool(row.generated.tokens) for row in self._rows.values())
        return decoding, len(self._rows) - decoding

    def close(self) -> None:
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _pop(self, numbers: Collection[int]) -> list[Generated]:
        generated = [self._rows.pop(number).generated for number in numbers]
        self._losses = 0 if generated else self._losses
        return generated

    # -------------------------------------------------------------------------------------------------------- server
    def _start(self) -> None:
        sampling, lora = self._config.generation, self._config.policy.lora
        arguments = {
            "version": self.version,
            "adapters": None if self._adapters is None else str(self._adapters),
            "sampling": {
                "temperature": sampling.temperature,
                "stop_token_ids": list(self._spec.eos_ids),
                "logit_bias": {} if self._spec.pad_id in self._spec.eos_ids else {self._spec.pad_id: _EXCLUDED},
            },
            "engine": {
                "model": str(self._folder / "model"),
                "dtype": (self._config.policy.precision if lora.rank else sampling.precision).value,
                "max_num_seqs": sampling.max_num_seqs,
                "tensor_parallel_size": len(self._devices),
                "skip_tokenizer_init": True,
                "logprobs_mode": "processed_logprobs",
                "async_scheduling": False,  # all tokens of a step are sampled by the same weights
                "disable_log_stats": True,
                "enable_lora": lora.rank > 0,
                "max_lora_rank": next(rank for rank in _RANKS if rank >= lora.rank),
                **sampling.engine_options,
            },
        }
        # enforce_eager alone does not disable the compilation of samplers
        eager = {"TORCH_COMPILE_DISABLE": "1"} if sampling.engine_options.get("enforce_eager") else {}
        excluded = ("PYTHONPATH", "LD_PRELOAD")  # those of this process are for its own Python
        variables = {k: v for k, v in os.environ.items() if k not in excluded}
        if not any(name == "cpu" or ":" in name for name in self._devices):  # they are CUDA's
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        defaults = _DEFAULTS | (_OF_SEVERAL if len(self._devices) > 1 else {})
        with (self._folder / "log").open("w") as log:
            self._server = subprocess.Popen(
                [*self._command, json.dumps(arguments)],
                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True},
                env=defaults | variables | _SETTINGS | eager,
                start_new_session=True,  # Ctrl-C must not reach the server
            )
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._server, self._inbox), daemon=True).start()
        self._loaded, self._ready = True, False

    def _wait(self) -> None:
        while not self._ready:
            self._receive(_WAIT_S)

    def _send(self, **message: object) -> None:
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(message) + "\n")
            self._server.stdin.flush()
        except OSError:  # the server ended; the inbox reports it
            pass

    def _receive(self, wait_s: float) -> None:
        """Processes the server's next message, if one arrives in time."""
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            if not self._ready:  # starting takes a minute or more on a busy machine
                report_progress()
            return
        report_progress()
        if message is None:
            return self._replace()
        self._ready = True
        self._loaded |= message.get("loaded") == self.version
        for number, tokens, log_probs, reason in message.get("rows", ()):
            if (row := self._rows.get(number)) is not None:  # otherwise it was aborted
                row.generated.tokens += tokens
                row.generated.log_probs += log_probs
                row.generated.versions += [message["version"]] * len(tokens)
                row.generated.ended, row.is_over = reason == "stop", bool(reason)

    def _replace(self) -> None:
        """Replaces a server that ended, and starts its unfinished rows again."""
        self._losses += 1
        code, log = self._server.wait(), (self._folder / "log").read_text(errors="replace").strip().splitlines()
        lines = "\n".join(log[-12:])
        fails_to_start = not self._ready and code > 0  # was not killed
        if fails_to_start or self._losses > _MOST_LOSSES:
            raise (ConfigError if fails_to_start else WorkerError)(
                f"generation.engine is vllm, but its server ended {self._losses} times in a row (exit code {code}): "
                f"correct generation.engine_options, or the cause at the end of its log:\n{lines}"
            )
        _LOG.warning("vLLM's server ended (exit code %s) and is replaced", code)
        self._start()
        unfinished = {number: row for number, row in self._rows.items() if not row.is_over}
        for number, row in unfinished.items():
            row.generated = Generated(number)
        self._submit(unfinished)
        if self._paused:
            self._send(do="pause")


def _read(server: subprocess.Popen[str], inbox: queue.SimpleQueue) -> None:
    assert server.stdout is not None
    for line in server.stdout:
        if line.endswith("\n"):  # the last line of a killed server may be incomplete
            inbox.put(json.loads(line))
    inbox.put(None)
