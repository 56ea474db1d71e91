"""Generation by vLLM, a separate engine: generation.engine=vllm, run.exact=false.

    first call      an engine starts from a folder (vllm_process.py), and is kept for later calls of this process
    other weights   they go to the engine; the first log-probs that it then tells are compared with training's
    each call       LLM.generate over all prompts of a block at once, G samples each

Beside our own engine (generation.py): nothing is handed on before all completions have ended; a row's generator is
keyed by (seed, iteration, prompt, sample), but who else is decoded may change its last bits, and with them a token; the
engine holds its share of the GPU (generation.vllm.gpu_memory_utilization) also while its stage is out of memory.

Log-probs are vLLM's `processed_logprobs`: of the distribution that was sampled from, temperature and excluded tokens
included.  (Its default, `raw_logprobs`, is the model's at temperature 1, before anything is excluded.)  They come from
other kernels, often in half precision: algorithm.tis_cap corrects for that, and losses/mismatch_* say how much
it is.  With a nucleus they would be of the nucleus, and nothing tells its mass, without which they cannot be compared
with training's: top_p stays 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from rlinf_embodied.config import VllmConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.randomness import words
from rlinf_embodied.reasoning.batch import GenerationBlock, Group, Noise, Prompt, SamplingParams
from rlinf_embodied.reasoning.dynamic_batching import Sequences, all_log_probs
from rlinf_embodied.reasoning.generation import require_context
from rlinf_embodied.reasoning.vllm_process import VllmEngine, vllm_package

_NEVER = -100.0  # the least logit bias that vLLM takes: e^-100 is no chance at all
_NUM_COMPARED = 8  # completions, of as many prompts
# mean |difference| of a token's log-prob to training's, in float32 and with an engine of another precision
_UNLIKE, _UNLIKE_HALF = 1e-3, 0.1  # an engine that is new computes something else
_ROUNDING, _ROUNDING_HALF = 1e-5, 1e-2  # never of other weights, however small it was when the engine was new
_GROWTH = 5.0  # of rounding while the policy learns: more than that is of other weights

_ENGINES: list[VllmEngine] = []  # of this process: none or one, as each holds a share of the GPU


def generate_with_vllm(
    policy: LanguagePolicy,
    block: GenerationBlock,
    sampling: SamplingParams,
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
        ConfigError: vLLM is not installed or does not start, a prompt with its completion exceeds the context, or top_p
            is not 1.
        ObjectiveError: the engine does not compute with the policy's weights.
    """
    settings = settings or VllmConfig()
    require_context(policy, block.prompts, sampling)
    rule = "vLLM does not tell the mass of a nucleus, without which its log-probs are not comparable"
    require(sampling.top_p == 1, "generation.top_p", sampling.top_p, rule, "use 1.0, or engine=transformers")
    vllm = vllm_package()
    engine = _engine(vllm, policy, version, settings)
    prompts = [vllm.TokensPrompt(prompt_token_ids=list(prompt.tokens)) for prompt in block.prompts]
    parameters = [_parameters(vllm, policy, block.group_size, sampling, noise, prompt) for prompt in block.prompts]
    answers = engine.llm.generate(prompts, parameters, use_tqdm=False)
    assert len(answers) == len(prompts), "vLLM answers every prompt, in their order"
    pairs = zip(block.prompts, answers, strict=True)
    groups = [_group(policy, prompt, _completions(answer.outputs, block.group_size)) for prompt, answer in pairs]
    if not engine.checked:
        _require_same_weights(engine, policy, groups, sampling.temperature or 1.0)
    return iter(groups)


def close_engine() -> None:
    """Ends this process's engine, if it has one, and gives its memory back."""
    while _ENGINES:
        _ENGINES.pop().close()


def _engine(vllm: ModuleType, policy: LanguagePolicy, version: int, settings: VllmConfig) -> VllmEngine:
    """Returns this process's engine, made now or kept, with the policy's weights."""
    if _ENGINES and _ENGINES[0].belongs_to(policy):
        _ENGINES[0].take(policy, version)
    else:
        close_engine()  # gives its memory back before the next one takes it
        _ENGINES.append(VllmEngine(vllm, policy, version, settings))
    return _ENGINES[0]


def _require_same_weights(
    engine: VllmEngine, policy: LanguagePolicy, groups: Sequence[Group], temperature: float
) -> None:
    """Compares an engine's log-probs with those of training's forward pass; those of a new engine tell its rounding.

    Raises:
        ObjectiveError: they are of other weights, or of another model.
    """
    found = _difference(policy, groups[:_NUM_COMPARED], temperature)
    full = engine.dtype == "float32"
    new = engine.rounding is None
    if engine.rounding is None:
        limit = _UNLIKE if full else _UNLIKE_HALF
        engine.rounding = found
    else:
        limit = max(_ROUNDING if full else _ROUNDING_HALF, _GROWTH * engine.rounding)
    if not found <= limit:
        close_engine()
        raise ObjectiveError(_unlike(engine, found, limit, new))
    engine.checked = True


def _difference(policy: LanguagePolicy, groups: Sequence[Group], temperature: float) -> float:
    """Returns mean |log pi(engine) - log pi(training)| over the tokens of each group's first completion."""
    rows = Sequences.of(groups)
    firsts = [sum(len(group.lengths) for group in groups[:number]) for number in range(len(groups))]
    compared = rows.select(firsts)
    own = all_log_probs(policy, compared, temperature, max(compared.lengths())).log_probs  # a row at a time
    pairs = zip(groups, own, compared.completions, strict=True)
    apart = [(group.log_probs[0, : len(tokens)] - row[: len(tokens)]).abs() for group, row, tokens in pairs]
    return float(torch.cat(apart).mean())


def _unlike(engine: VllmEngine, found: float, limit: float, new: bool) -> str:
    told = f"vLLM's log-probs differ from training's by {found:.3g} per token (mean; its dtype is {engine.dtype}), but"
    if new:
        return (
            f"{told} a new engine's differ by at most {limit:g}: it computes another function than the policy; use "
            "generation.vllm.dtype=float32 to see whether it is rounding, or generation.engine=transformers"
        )
    return (
        f"{told} with these weights' first engine it was {engine.rounding:.3g}, and {limit:.3g} is the limit: part of "
        f"the new weights did not reach it by generation.vllm.update={engine.way.value}; use "
        "generation.vllm.update=restart, which starts an engine with each version of the weights"
    )


# ---------------------------------------------------------------------------------------------------- what is asked for
def _parameters(
    vllm: ModuleType, policy: LanguagePolicy, group_size: int, sampling: SamplingParams, noise: Noise, prompt: Prompt
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
