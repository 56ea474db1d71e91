"""A stand-in for the package vllm: the classes and methods that its documentation names, over a transformers model.

It refuses what vLLM refuses, draws each sample from seed + index, keeps the first step of prompts that it has read
(prefix caching), and lives until it is shut down.

    LLM            keeps weights as parameters, as on a GPU
    PackedLLM      computes with a packed copy of the head, as on a CPU; reload_weights forgets that of a tied one
    StubbornLLM    takes no new weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        assert self.ignore_eos
        assert self.logprobs == 0
        assert all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values())
        assert self.seed is not None
        assert 0 <= self.seed < 2**63


ENGINES: list[_Engine] = []  # all that were made


class _Engine:
    """What decodes: a step makes a token for each request, as long as one is unfinished."""

    def __init__(self) -> None:
        self.requests: dict[int, Iterator[SimpleNamespace | None]] = {}
        self.alive = True
        self.engine_core = self
        ENGINES.append(self)

    def step(self) -> list[SimpleNamespace]:
        assert self.alive
        outputs = {number: next(request) for number, request in self.requests.items()}
        finished = {number: output for number, output in outputs.items() if output is not None}
        self.requests = {number: request for number, request in self.requests.items() if number not in finished}
        return list(finished.values())

    def shutdown(self, timeout: float | None = None) -> None:
        assert self.alive
        self.alive = False


class LLM:
    """An engine on a GPU."""

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool,
        dtype: str,
        seed: int,
        gpu_memory_utilization: float,
        enforce_eager: bool,
        max_model_len: int | None,
        logprobs_mode: str,
    ) -> None:
        assert logprobs_mode == "processed_logprobs"
        self._model = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval()
        self._longest = max_model_len or self._model.config.max_position_embeddings
        self.llm_engine = _Engine()
        self._first: dict[tuple[int, ...], Tensor] = {}  # logits after prompts that were read

    def generate(
        self, prompts: Sequence[TokensPrompt], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool = True
    ) -> list[SimpleNamespace]:
        pairs = list(zip(prompts, sampling_params, strict=True))
        assert all(len(p["prompt_token_ids"]) + s.max_tokens <= self._longest for p, s in pairs)
        requests = {i: self._request(i, p["prompt_token_ids"], parameters) for i, (p, parameters) in enumerate(pairs)}
        self.llm_engine.requests = requests
        outputs: list[SimpleNamespace] = []
        while self.llm_engine.requests:
            outputs += self.llm_engine.step()
        return sorted(outputs, key=lambda output: output.request_id)

    def apply_model(self, func: Callable[[nn.Module], object]) -> list[object]:
        return [func(self._model)]

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> list[None]:
        assert method == "reload_weights"
        (file,) = Path(kwargs["weights_path"]).glob("*.safetensors")
        self._reload(load_file(file))
        return [None]

    def reset_prefix_cache(self) -> bool:
        self._first.clear()
        return True

    @torch.no_grad()
    def _reload(self, weights: dict[str, Tensor]) -> None:
        own = dict(self._model.named_parameters())
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def _request(self, number: int, prompt: list[int], parameters: SamplingParams) -> Iterator[SimpleNamespace | None]:
        samples = [self._completion(prompt, parameters, index) for index in range(parameters.n)]
        ended: list[SimpleNamespace] = []
        while samples:
            made = [(sample, next(sample)) for sample in samples]
            ended += [output for _, output in made if output is not None]
            samples = [sample for sample, output in made if output is None]
            yield None if samples else SimpleNamespace(request_id=number, outputs=ended)  # the first has ended first

    @torch.no_grad()
    def _completion(
        self, prompt: list[int], parameters: SamplingParams, index: int
    ) -> Iterator[SimpleNamespace | None]:
        generator = torch.Generator().manual_seed((parameters.seed or 0) + index)
        tokens, log_probs, reason = list[int](), list[dict[int, SimpleNamespace]](), "length"
        while len(tokens) < parameters.max_tokens and reason == "length":
            logits = self._logits(prompt, tokens).clone()
            for token, bias in (parameters.logit_bias or {}).items():
                logits[token] += bias
            processed = (logits / (parameters.temperature or 1.0)).log_softmax(-1)
            greedy = parameters.temperature == 0
            token = int(processed.argmax() if greedy else torch.multinomial(processed.exp(), 1, generator=generator))
            tokens.append(token)
            log_probs.append({token: SimpleNamespace(logprob=float(processed[token]))})
            if token in (parameters.stop_token_ids or ()):
                reason = "stop"
            elif len(tokens) < parameters.max_tokens:
                yield None
        yield SimpleNamespace(index=index, token_ids=tokens, logprobs=log_probs, finish_reason=reason)

    def _logits(self, prompt: list[int], tokens: list[int]) -> Tensor:
        key = tuple(prompt)
        if tokens or key not in self._first:
            hidden = self._model.base_model(input_ids=torch.tensor([prompt + tokens]), use_cache=False)[0][0, -1]
            found = self._head(hidden).float()
            if tokens:
                return found
            self._first[key] = found
        return self._first[key]

    def _head(self, hidden: Tensor) -> Tensor:
        return self._model.lm_head(hidden)


class PackedLLM(LLM):
    """An engine on a CPU."""

    def __init__(self, model: str, **options: object) -> None:
        super().__init__(model, **options)  # pyright: ignore[reportArgumentType]
        head = self._model.lm_head
        self._packed = head.weight.detach().clone()
        head.quant_method = SimpleNamespace(process_weights_after_loading=self._pack)

    def _pack(self, head: nn.Linear) -> None:
        self._packed = head.weight.detach().clone()

    def _reload(self, weights: dict[str, Tensor]) -> None:
        super()._reload(weights)
        if "lm_head.weight" in weights:
            self._pack(self._model.lm_head)

    def _head(self, hidden: Tensor) -> Tensor:
        return hidden @ self._packed.T


class StubbornLLM(LLM):
    """An engine that takes no new weights."""

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> list[None]:
        raise Exception("Call to collective_rpc method failed: Model reloading with `dummy` format")
