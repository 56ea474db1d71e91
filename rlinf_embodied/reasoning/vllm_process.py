"""vLLM's engine in a separate process: how it starts, takes new weights, and ends.

    start     policy.save -> a folder -> vllm.LLM(folder)
    load      policy.save -> a folder -> LLM.apply_model: the model reads it into the parameters that it has
    reload    policy.save -> a folder -> vLLM's reload_weights, which recomputes the derived tensors; then the same
              for tied layers, which that leaves out
    restart   the engine ends, and another starts from a folder: slow, and right for every model

`generation.vllm.update=auto` takes the first of the three that vLLM does not refuse.  To load is refused where vLLM has
emptied parameters (on a CPU it packs matrices, and computes with the copies); both are where they raise.  Whether all
weights arrived is asked of the log-probs (vllm_engine.py): a way may also fail silently.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import weakref
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from rlinf_embodied.config import VllmConfig, WeightUpdate
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.reasoning.vllm_model import emptied_weights, end_with, load_folder, model_dtype, process_tied

_LOG = logging.getLogger(__name__)
_MODEL = "model"  # in a folder of this process
_GRACE_S = 30.0  # for what vLLM does at its end
# vLLM sends a function to its engine's process only where this says that it may; both processes are ours
_SENDS_FUNCTIONS = "VLLM_ALLOW_INSECURE_SERIALIZATION"


def vllm_package() -> ModuleType:
    """Returns the package vllm.

    Raises:
        ConfigError: it cannot be imported.
    """
    os.environ.setdefault(_SENDS_FUNCTIONS, "1")
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"the engine is 'vllm', but the package vllm cannot be imported ({error}): pip install "
            "'rlinf-embodied[vllm]' (on a CPU see docs/reasoning.md), or use generation.engine=transformers"
        ) from error
    return vllm


class VllmEngine:
    """A running engine with a version of a policy's weights.

    `checked` and `rounding` belong to who reads its log-probs: whether those of its weights were compared with
    training's, and by how much they differed when the engine was new, as a mean.
    """

    def __init__(self, vllm: ModuleType, policy: LanguagePolicy, version: int, settings: VllmConfig) -> None:
        """Starts it.

        Raises:
            ConfigError: vLLM cannot start with this model and these settings.
        """
        self._vllm, self._settings = vllm, settings
        self._module = weakref.ref(policy.module)
        every = (WeightUpdate.load, WeightUpdate.reload, WeightUpdate.restart)
        self._ways: tuple[WeightUpdate, ...] = every if settings.update is WeightUpdate.auto else (settings.update,)
        self._start(policy, version)

    def _start(self, policy: LanguagePolicy, version: int) -> None:
        self.llm: Any = None  # vllm.LLM; the package need not be there
        settings, self._folder = self._settings, TemporaryDirectory(prefix="rlinf-")  # vLLM may look into it again
        policy.save(Path(self._folder.name, _MODEL))
        try:
            self.llm = self._vllm.LLM(
                model=str(Path(self._folder.name, _MODEL)),
                skip_tokenizer_init=True,  # tokens go in, tokens come out
                dtype=settings.dtype,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                enforce_eager=settings.enforce_eager,
                tensor_parallel_size=settings.tensor_parallel_size,
                max_model_len=settings.max_model_len,
                logprobs_mode="processed_logprobs",
                seed=0,  # each request brings its own
            )
        except (RuntimeError, ValueError, OSError) as error:
            self._folder.cleanup()
            raise ConfigError(
                f"generation.vllm is {settings}, but vLLM does not start on {policy.spec.name} with it ({error}): what "
                "it wrote above says why; use settings and a model that it takes, or generation.engine=transformers"
            ) from error
        self._version, self.checked = version, False
        self.rounding: float | None = None
        self.dtype, self._processes = "unknown", []
        if hasattr(self.llm, "apply_model"):
            self.dtype = str(self.llm.apply_model(model_dtype)[0])
            others = {*self.llm.apply_model(partial(end_with, os.getpid()))} - {os.getpid()}
            self._processes = [os.pidfd_open(pid) for pid in others if hasattr(os, "pidfd_open")]

    def belongs_to(self, policy: LanguagePolicy) -> bool:
        """Whether it was made from this policy, at whatever version."""
        return self._module() is policy.module

    def close(self) -> None:
        """Ends vLLM's processes and waits until they are gone, and with them what they held of the device's memory.

        vLLM itself would end them once nobody refers to any part of it, and does not wait.
        """
        if self.llm is None:
            return
        held = self.llm.llm_engine
        next(part for part in (self.llm, held, held.engine_core) if hasattr(part, "shutdown")).shutdown()
        self.llm = None
        for process in self._processes:
            _wait_for_end(process)
        self._folder.cleanup()

    # ----------------------------------------------------------------------------------------------------- new weights
    @property
    def way(self) -> WeightUpdate:
        """How new weights go to it, as far as is known."""
        return self._ways[0]

    def take(self, policy: LanguagePolicy, version: int) -> None:
        """Gets a version of the policy's weights, unless it has it.

        Raises:
            ConfigError: generation.vllm.update names a way that vLLM refuses, or no engine starts.
        """
        if version == self._version:
            return
        while refusal := self._refused(self._ways[0], policy, version):
            way, self._ways = self._ways[0], self._ways[1:]
            if not self._ways:
                raise ConfigError(
                    f"generation.vllm.update is {way.value!r}, but vLLM refuses that ({refusal}): use auto or restart"
                )
            _LOG.info("vLLM cannot %s weights (%s): %s takes its place", way.value, refusal, self._ways[0].value)
        self._version, self.checked = version, False

    def _refused(self, way: WeightUpdate, policy: LanguagePolicy, version: int) -> str | None:
        """Tries a way; returns None, or why it cannot be gone."""
        if way is WeightUpdate.restart:
            self.close()
            self._start(policy, version)
            return None
        if not hasattr(self.llm, "apply_model"):
            return "this version cannot reach its model"
        with TemporaryDirectory(prefix="rlinf-") as root:
            folder = Path(root, _MODEL)
            try:
                policy.save(folder)
                overwrite = self._load if way is WeightUpdate.load else self._reload
                return overwrite(str(folder))
            except Exception as error:  # noqa: BLE001 (a process boundary: what the engine's raised comes as Exception)
                return str(error) or type(error).__name__

    def _load(self, folder: str) -> str | None:
        if emptied := [name for names in self.llm.apply_model(emptied_weights) for name in names]:
            return f"it has emptied {len(emptied)} parameters, such as {emptied[0]}, for copies in another form"
        self.llm.apply_model(partial(load_folder, folder))
        self.llm.reset_prefix_cache()  # what it holds is of the old weights

    def _reload(self, folder: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.apply_model(process_tied)
        self.llm.reset_prefix_cache()


def _wait_for_end(process: int) -> None:
    """Waits for a process by its descriptor, which it closes; kills one that does not end."""
    gone = select.poll()
    gone.register(process, select.POLLIN)
    if not gone.poll(_GRACE_S * 1000):
        signal.pidfd_send_signal(process, signal.SIGKILL)
        gone.poll()
    os.close(process)
