"""Generation by vLLM, an engine for GPUs: pip install 'rlinf-embodied[vllm]', generation.engine=vllm, run.exact=false.

    first call      policy.save -> a folder -> vllm.LLM, in a process of its own, kept for later calls of this one
    other weights   policy.save -> a folder -> LLM.apply_model: the engine's model reads it; cached prefixes are dropped
    each call       LLM.generate over all prompts of a block at once, G samples each

Beside our own engine (generation.py): nothing is handed on before all completions have ended; a row's generator is
keyed by (seed, iteration, prompt, sample), but who else is decoded may change its last bits, and with them a token; the
engine holds its share of the GPU (generation.vllm.gpu_memory_utilization) also while its stage is out of memory.

Log-probs are vLLM's `processed_logprobs`: of the distribution that was sampled from, temperature and excluded tokens
included.  (Its default, `raw_logprobs`, is the model's at temperature 1, before anything is excluded.)  They come from
other kernels, often in half precision: algorithm.importance_cap corrects for that, and losses/mismatch_* say how much
it is.  With a nucleus they would be of the nucleus, and nothing tells its mass, without which they cannot be compared
with training's: top_p stays 1.

Written against vLLM's documentation and tested with a stand-in of the same interface: it has not run with vLLM itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from rlinf_embodied.config import VllmConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.randomness import words
from rlinf_embodied.reasoning.batch import GenerationBlock, Group, Noise, Prompt, Sampling
from rlinf_embodied.reasoning.generation import require_context
from rlinf_embodied.runtime.own_folder import OwnFolder

_NEVER = -100.0  # the least logit bias that vLLM takes: e^-100 is no chance at all
_MODEL = "model"  # in a folder of this process
# vLLM sends a function to its engine's process only where this says that it may; both processes are ours
_SENDS_FUNCTIONS = "VLLM_ALLOW_INSECURE_SERIALIZATION"


@dataclass(slots=True)
class _Engine:
    llm: Any  # vllm.LLM; the package need not be there
    module: weakref.ref[nn.Module]  # of the policy that it was made from
    version: int  # of the weights that it holds
    folder: OwnFolder  # that it was made from


_ENGINES: list[_Engine] = []  # of this process: none or one, as each holds a share of the GPU


def generate_with_vllm(
    policy: LanguagePolicy,
    block: GenerationBlock,
    sampling: Sampling,
    noise: Noise,
    version: int,
    settings: VllmConfig | None = None,
) -> Iterator[Group]:
    """Completes a block and returns its groups in the order of the prompts.

    Args:
        policy: whose weights are sampled from; the engine gets them where it has another version.
        block: what to complete.
        sampling: how; top_p is 1.
        noise: keys of the generators.
        version: of the weights.
        settings: of a new engine.

    Raises:
        ConfigError: vLLM is not installed, a prompt with its completion exceeds the context, or top_p is not 1.
    """
    require_context(policy, block.prompts, sampling)
    rule = "vLLM does not tell the mass of a nucleus, without which its log-probs are not comparable"
    require(sampling.top_p == 1, "generation.top_p", sampling.top_p, rule, "use 1.0, or engine=transformers")
    vllm = _package()
    llm = _engine(vllm, policy, version, settings or VllmConfig())
    prompts = [vllm.TokensPrompt(prompt_token_ids=list(prompt.tokens)) for prompt in block.prompts]
    parameters = [_parameters(vllm, policy, block.group_size, sampling, noise, prompt) for prompt in block.prompts]
    answers = llm.generate(prompts, parameters, use_tqdm=False)
    assert len(answers) == len(prompts), "vLLM answers every prompt, in their order"
    pairs = zip(block.prompts, answers, strict=True)
    return (_group(policy, prompt, _completions(answer.outputs, block.group_size)) for prompt, answer in pairs)


# ---------------------------------------------------------------------------------------------------------- the engine
def _package() -> ModuleType:
    os.environ.setdefault(_SENDS_FUNCTIONS, "1")
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"generation.engine is 'vllm', but the package vllm cannot be imported ({error}): "
            "pip install 'rlinf-embodied[vllm]', or use generation.engine=transformers"
        ) from error
    return vllm


def _engine(vllm: ModuleType, policy: LanguagePolicy, version: int, settings: VllmConfig) -> Any:
    """Returns this process's engine, made now or kept, with the policy's weights."""
    held = _ENGINES[0] if _ENGINES else None
    known = held is not None and held.module() is policy.module
    if held is not None and known and held.version == version:
        return held.llm
    if held is not None and known and hasattr(held.llm, "apply_model"):
        _update(held.llm, policy)
        held.version = version
        return held.llm
    del held
    _ENGINES.clear()  # gives its memory back before the next one takes it
    folder = OwnFolder()
    policy.save(folder.path / _MODEL)
    llm = vllm.LLM(
        model=str(folder.path / _MODEL),
        skip_tokenizer_init=True,  # tokens go in, tokens come out
        dtype=settings.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        logprobs_mode="processed_logprobs",
        seed=0,  # each request brings its own
    )
    _ENGINES.append(_Engine(llm, weakref.ref(policy.module), version, folder))
    return llm


def _update(llm: Any, policy: LanguagePolicy) -> None:
    folder = OwnFolder()
    try:
        policy.save(folder.path / _MODEL)
        llm.apply_model(partial(load_folder, str(folder.path / _MODEL)))
    finally:
        folder.cleanup()
    llm.reset_prefix_cache()  # what it holds is of the old weights


def load_folder(folder: str, model: nn.Module) -> None:
    """Overwrites the weights of an engine's model with those of a folder; runs in the engine's process."""
    files = sorted(Path(folder).glob("*.safetensors"))
    assert files, f"{folder} holds no weights"
    cast(Any, model).load_weights(item for file in files for item in load_file(file).items())


# ---------------------------------------------------------------------------------------------------- what is asked for
def _parameters(
    vllm: ModuleType, policy: LanguagePolicy, group_size: int, sampling: Sampling, noise: Noise, prompt: Prompt
) -> Any:
    """Returns a request's SamplingParams; vLLM has sample k of a prompt draw from a seed that is k larger."""
    spec = policy.spec
    key = words(noise.seed, f"vllm {noise.purpose}", noise.iteration, prompt.id)
    return vllm.SamplingParams(
        n=1 if sampling.temperature == 0 else group_size,  # the likeliest tokens are asked for once
        temperature=sampling.temperature,
        top_p=1.0,
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
    tables = (tokens, torch.tensor(lengths), log_probs, torch.zeros_like(log_probs), ended)
    return Group(prompt, *(table.to(device) for table in tables))
