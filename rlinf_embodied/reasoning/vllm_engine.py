"""Generation by vLLM, a separate engine: generation.engine=vllm, run.exact=false.

    first call      policy.save -> a folder -> vllm.LLM(folder), kept for later calls of this process
    other weights   policy.save -> a folder -> vLLM's reload_weights, then the same for tied layers, which that leaves
                    out
    then            the actor compares its log-probs with training's: a reload may also fail silently
    each call       LLM.generate over all prompts of a block at once, G samples each; each of its steps is progress

Unlike our own engine (generation.py) it hands on nothing before all completions have ended; a row's generator is keyed
by (seed, iteration, prompt, sample), but the rows that decode with it may change its last bits, and with them a token;
the engine lives in this process, and holds its share of the GPU (generation.vllm.gpu_memory_utilization) also while its
stage is out of memory.

Log-probs are vLLM's `processed_logprobs`: of the distribution that was sampled from, temperature and excluded tokens
included.  (Its default, `raw_logprobs`, is the model's at temperature 1, before anything is excluded.)  They come from
other kernels, often in half precision: algorithm.tis_cap corrects for that, and losses/mismatch_* report how much
it is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from rlinf_embodied.config import VllmConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.randomness import words
from rlinf_embodied.reasoning.batch import GenerationBlock, Group, Noise, Prompt, SamplingParams
from rlinf_embodied.telemetry.progress import report_progress

_NEVER = -100.0  # the least logit bias that vLLM takes: e^-100 is no chance at all
_UNLIKE, _UNLIKE_HALF = 1e-3, 0.1  # mean |difference| of a token's log-prob to training's, in float32 and otherwise

_ENGINES: list[VllmEngine] = []  # of this process: none or one, as each holds a share of the GPU


def generate_with_vllm(
    policy: LanguagePolicy,
    block: GenerationBlock,
    sampling: SamplingParams,
    noise: Noise,
    version: int,
    settings: VllmConfig,
) -> Iterator[Group]:
    """Completes a block and returns its groups in the order of the prompts.

    Args:
        policy: whose weights are sampled from; the engine gets them where it has another version.
        block: what to complete.
        sampling: how.
        noise: keys of the generators.
        version: of the weights.
        settings: of a new engine.

    Raises:
        ConfigError: vLLM is not installed, does not start or takes no weights.
    """
    vllm = _package()
    if not _ENGINES or _ENGINES[0].module() is not policy.module:
        close_engine()  # gives its memory back before the next one takes it
        _ENGINES.append(VllmEngine(vllm, policy, version, settings))
    engine = _ENGINES[0]
    engine.take(policy, version)
    prompts = [vllm.TokensPrompt(prompt_token_ids=list(prompt.tokens)) for prompt in block.prompts]
    parameters = [_parameters(vllm, policy, block.group_size, sampling, noise, prompt) for prompt in block.prompts]
    answers = engine.llm.generate(prompts, parameters, use_tqdm=False)
    pairs = zip(block.prompts, answers, strict=True)  # vLLM answers every prompt, in their order
    return (_group(policy, prompt, _completions(answer.outputs, block.group_size)) for prompt, answer in pairs)


def close_engine() -> None:
    """Ends this process's engine, if it has one, and gives its memory back."""
    while _ENGINES:
        _ENGINES.pop().close()


def _package() -> ModuleType:
    """Returns the package vllm.

    Raises:
        ConfigError: it cannot be imported.
    """
    # otherwise the engine is another process, which would outlive this one where it is killed
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"the engine is 'vllm', but the package vllm cannot be imported ({error}): pip install "
            "'rlinf-embodied[vllm]' (on a CPU see docs/reasoning.md), or use generation.engine=transformers"
        ) from error
    return vllm


# ----------------------------------------------------------------------------------------------------------- the engine
class VllmEngine:
    """A running engine with a version of a policy's weights."""

    def __init__(self, vllm: ModuleType, policy: LanguagePolicy, version: int, settings: VllmConfig) -> None:
        """Starts it.

        Raises:
            ConfigError: vLLM cannot start with this model and these settings.
        """
        self.module, self._version = weakref.ref(policy.module), version
        self._folder = TemporaryDirectory(prefix="rlinf-")  # vLLM may look into it again
        policy.save(Path(self._folder.name))
        try:
            self.llm: Any = vllm.LLM(  # the package need not be there
                model=self._folder.name,
                skip_tokenizer_init=True,  # tokens go in, tokens come out
                dtype=settings.dtype,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                enforce_eager=settings.enforce_eager,
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
        self.llm.llm_engine.step = _reporting(self.llm.llm_engine.step)  # what LLM.generate calls in a loop

    def take(self, policy: LanguagePolicy, version: int) -> None:
        """Gets a version of the policy's weights, unless it has it.

        Raises:
            ConfigError: vLLM refuses to reload.
        """
        if version == self._version:
            return
        try:
            with TemporaryDirectory(prefix="rlinf-") as folder:
                policy.save(Path(folder))
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self.llm.apply_model(process_tied)
            self.llm.reset_prefix_cache()  # what it holds is of the old weights
        except Exception as error:  # a process boundary: what a worker of the engine raised comes as Exception
            raise ConfigError(
                f"generation.engine is 'vllm', but it takes no new weights of {policy.spec.name} "
                f"({error or type(error).__name__}): use generation.engine=transformers, or another model"
            ) from error
        self._version = version

    def close(self) -> None:
        """Ends the engine."""
        held = self.llm.llm_engine
        next(part for part in (self.llm, held, held.engine_core) if hasattr(part, "shutdown")).shutdown()
        self._folder.cleanup()


def _reporting(step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a step of the engine that reports progress, so that a generation of hours is no hang."""

    def reporting() -> Any:
        outputs = step()
        report_progress()
        return outputs

    return reporting


@torch.no_grad()
def process_tied(model: nn.Module) -> None:
    """Recomputes what vLLM derived from weights that an earlier module owns.

    vLLM's reload_weights processes shared weights for the first of their modules only: a tied lm_head would keep
    a packed copy of the old embeddings.
    """
    owner: dict[int, str] = {}
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if any(owner.setdefault(key, name) != name for key in own) and hasattr(module, "quant_method"):
            cast(Any, module).quant_method.process_weights_after_loading(module)


def require_same_weights(mismatch: float, settings: VllmConfig) -> None:
    """Checks the mean |difference| of log-probs between the engine and training, which are of the same weights.

    Raises:
        ObjectiveError: they are of other weights, or of another model.
    """
    limit = _UNLIKE if settings.dtype == "float32" else _UNLIKE_HALF
    if not mismatch <= limit:
        raise ObjectiveError(
            f"vLLM's log-probs differ from training's by {mismatch:.3g} per token (mean; {limit:g} is the limit): it "
            "computes another function than the policy, or new weights did not reach it; use "
            "generation.vllm.dtype=float32 to see whether it is rounding, or generation.engine=transformers"
        )


# ------------------------------------------------------------------------------------------------ requests and answers
def _parameters(
    vllm: ModuleType, policy: LanguagePolicy, group_size: int, sampling: SamplingParams, noise: Noise, prompt: Prompt
) -> Any:
    """Returns a request's SamplingParams; vLLM draws sample k of a prompt from a seed that is k larger."""
    spec = policy.spec
    key = words(noise.seed, f"vllm {noise.purpose}", noise.iteration, prompt.id)
    return vllm.SamplingParams(
        n=1 if sampling.temperature == 0 else group_size,  # the likeliest tokens are asked for once
        temperature=sampling.temperature,
        seed=int(key >> 2),  # room for the samples
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(spec.eos_ids),
        ignore_eos=True,  # a completion ends with the tokens above, whatever a generation_config.json says
        logit_bias=None if spec.pad_id in spec.eos_ids else {spec.pad_id: _NEVER},
        logprobs=0,  # of the token that was drawn, and of no other
        detokenize=False,
    )


def _completions(outputs: Sequence[Any], group_size: int) -> list[Any]:
    ordered = sorted(outputs, key=lambda output: output.index)
    return ordered if len(ordered) == group_size else ordered * group_size


def _group(policy: LanguagePolicy, prompt: Prompt, completions: Sequence[Any]) -> Group:
    """Returns completions (vllm.CompletionOutput) as a group, on the policy's device."""
    device = next(policy.module.parameters()).device
    lengths = [len(completion.token_ids) for completion in completions]
    tokens = torch.full((len(completions), max(lengths)), policy.spec.pad_id)
    log_probs = torch.zeros(tokens.shape)
    for row, completion in enumerate(completions):
        drawn = list(completion.token_ids)
        tokens[row, : len(drawn)] = torch.tensor(drawn)
        found = [at[token].logprob for at, token in zip(completion.logprobs, drawn, strict=True)]
        log_probs[row, : len(drawn)] = torch.tensor(found)
    ended = torch.tensor([completion.finish_reason == "stop" for completion in completions])
    tables = (tokens, torch.tensor(lengths), log_probs, ended)
    return Group(prompt, *(table.to(device) for table in tables))
