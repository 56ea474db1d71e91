"""A stand-in for the package vllm: the classes and methods that its documentation names, over a transformers model.

It refuses what vLLM refuses, draws each sample from seed + index, keeps the first step of prompts that it has read
(prefix caching), and lives until it is shut down.

    LLM            keeps weights as parameters, as on a GPU
    PackedLLM      computes with packed copies of emptied parameters, as on a CPU; reload_weights forgets a tied head's
    StubbornLLM    takes no new weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 when using greedy sampling, got {self.n}.")
        assert all(-100 <= bias <= 100 for bias in (self.logit_bias or {}).values())
        assert self.seed is None or 0 <= self.seed < 2**63


class _Model(nn.Module):
    """The engine's model: it takes weights by their names in a Hugging Face folder, tied ones once."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()

    @property
    def computing(self) -> PreTrainedModel:
        """What computes."""
        return self.inner

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = dict(self.inner.named_parameters()), set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            loaded.add(name)
        return loaded

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.load_weights(weights)


class _PackedModel(_Model):
    """The matrices of its linear layers are copies, from which only the head keeps the parameter too."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        copies = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        copies.lm_head.weight = nn.Parameter(copies.lm_head.weight.detach().clone())
        self._copies = [copies]  # in a list, so that its parameters are not the model's
        head = self.inner.lm_head
        head.quant_method = SimpleNamespace(process_weights_after_loading=self._pack_head)
        for layer in self.inner.modules():
            if isinstance(layer, nn.Linear) and layer is not head:
                layer.weight.data = torch.empty(0)

    @property
    def computing(self) -> PreTrainedModel:
        return self._copies[0]

    @torch.no_grad()
    def _pack_head(self, head: nn.Linear) -> None:
        self.computing.lm_head.weight.copy_(head.weight)

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own, copies = dict(self.inner.named_parameters()), dict(self.computing.named_parameters())
        for name, tensor in weights:
            copies[name].data.copy_(tensor)
            if own[name].numel():
                own[name].data.copy_(tensor)


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

    model_class = _Model

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        assert logprobs_mode in ("raw_logprobs", "processed_logprobs")
        self._model, self._mode = self.model_class(model), logprobs_mode
        self._longest = max_model_len or self._model.inner.config.max_position_embeddings
        self.llm_engine = _Engine()
        self._first: dict[tuple[int, ...], Tensor] = {}  # logits after prompts that were read

    def generate(
        self, prompts: Sequence[TokensPrompt], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool = True
    ) -> list[SimpleNamespace]:
        pairs = list(zip(prompts, sampling_params, strict=True))
        assert all(len(p["prompt_token_ids"]) + (s.max_tokens or 0) <= self._longest for p, s in pairs)
        requests = {i: self._request(i, p["prompt_token_ids"], parameters) for i, (p, parameters) in enumerate(pairs)}
        self.llm_engine.requests = requests
        outputs: list[SimpleNamespace] = []
        while self.llm_engine.requests:
            outputs += self.llm_engine.step()
        return sorted(outputs, key=lambda output: output.request_id)

    def apply_model(self, func: Callable[[nn.Module], object]) -> list[object]:
        assert self.llm_engine.alive
        return [func(self._model)]

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> list[None]:
        assert method == "reload_weights"
        (file,) = Path(kwargs["weights_path"]).glob("*.safetensors")
        self._model.reload(load_file(file).items())
        return [None]

    def reset_prefix_cache(self) -> bool:
        self._first.clear()
        return True

    def _request(self, number: int, prompt: list[int], parameters: SamplingParams) -> Iterator[SimpleNamespace | None]:
        samples = [self._completion(prompt, parameters, index) for index in range(parameters.n)]
        ended: list[SimpleNamespace] = []
        while samples:
            made = [(sample, next(sample)) for sample in samples]
            ended += [output for _, output in made if output is not None]
            samples = [sample for sample, output in made if output is None]
            yield (
                None if samples else SimpleNamespace(request_id=number, outputs=ended)
            )  # whoever is first has ended first

    @torch.no_grad()
    def _completion(
        self, prompt: list[int], parameters: SamplingParams, index: int
    ) -> Iterator[SimpleNamespace | None]:
        generator = torch.Generator()
        if parameters.seed is not None:
            generator.manual_seed(parameters.seed + index)
        tokens: list[int] = []
        log_probs: list[dict[int, SimpleNamespace]] = []
        reason = "length"
        while len(tokens) < (parameters.max_tokens or 1 << 30) and reason == "length":
            raw = self._logits(prompt, tokens)
            logits = raw.clone()
            for token, bias in (parameters.logit_bias or {}).items():
                logits[token] += bias
            processed = (logits / (parameters.temperature or 1.0)).log_softmax(-1)
            greedy = parameters.temperature == 0
            token = int(processed.argmax() if greedy else torch.multinomial(processed.exp(), 1, generator=generator))
            told = processed if self._mode == "processed_logprobs" else raw.log_softmax(-1)
            tokens.append(token)
            log_probs.append({token: SimpleNamespace(logprob=float(told[token]))})
            if token in (parameters.stop_token_ids or ()) or (not parameters.ignore_eos and token == self._eos()):
                reason = "stop"
            if reason == "length" and len(tokens) < (parameters.max_tokens or 1 << 30):
                yield None
        assert parameters.logprobs == 0
        yield SimpleNamespace(index=index, token_ids=tokens, logprobs=log_probs, finish_reason=reason)

    def _logits(self, prompt: list[int], tokens: list[int]) -> Tensor:
        key = tuple(prompt)
        if tokens or key not in self._first:
            ids = torch.tensor([prompt + tokens])
            found = self._model.computing(input_ids=ids, use_cache=False).logits[0, -1].float()
            if tokens:
                return found
            self._first[key] = found
        return self._first[key]

    def _eos(self) -> int | None:
        return self._model.inner.config.eos_token_id


class PackedLLM(LLM):
    """An engine on a CPU."""

    model_class = _PackedModel


class StubbornLLM(LLM):
    """An engine that takes no new weights."""

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> list[None]:
        raise Exception("Call to collective_rpc method failed: Model reloading with `dummy` format")
