"""Supervised fine-tuning: its stage and graph, and the warm start of RL, which is such a run.

An iteration is a number of optimizer steps on direct answers and chains of thought, in a fixed number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import LanguageSFTConfig, LoraSettings, MathConfig, Precision
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate, template_text
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.device import computing
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.update import fit
from rlinf_embodied.randomness import permutation, uniform
from rlinf_embodied.reasoning.actor_stage import LanguageLearner
from rlinf_embodied.reasoning.batch import all_log_probs, dynamic_batches
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.tool_calls import Tool, ToolCalls
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.training import warm_start as common
from rlinf_embodied.workflow.graph import StageSpec, Workflow

FINE_TUNING = "fine_tuning"
NUM_BLOCKS = 2  # of examples: fixed, so that weights do not depend on the number of devices
_MIN_WASTE = 0.5  # a microbatch is split if more than this fraction of it would be padding
_VERSION = 1  # of this code, in the keys of cached policies
_WARMUP_STEPS = 20
# settings of `policy` that do not affect the small model
_OF_OTHER_MODELS = (
    *("critic_target", "lora", "precision", "system_prompt", "chat_template_args", "packing", "checkpoint_activations"),
)
_FIRST = 1 << 39  # position of the first example in an endless stream, which RL never reaches


def fine_tuning_workflow(config: MathConfig, policy_folder: str) -> Workflow:
    """Returns the graph of the one stage; the folder "" means a new policy."""
    stage_config = StageConfig(config, policy_folder)
    spec = StageSpec(FINE_TUNING, f"{__name__}.FineTuningStage", stage_config, collective=True)
    return Workflow("fine-tuning", NUM_BLOCKS, {FINE_TUNING: spec})


def fine_tuning_of(config: MathConfig) -> MathConfig:
    """Returns the config of the warm start, a run of supervised fine-tuning."""
    # adapters over random weights would learn little, and packed rows have different last bits
    policy = replace(config.policy, lora=LoraSettings(rank=0), precision=Precision.float32, packing=False)
    run = replace(config.run, num_iterations=config.warm_start.num_iterations)
    return replace(config, policy=policy, algorithm=config.warm_start, run=run)


def starting_policy(config: MathConfig, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
    """Returns the folder that a training starts from: a configured one, or that of the cached small model.

    The small model is fine-tuned, unless the training is fine-tuning itself.
    """
    folder = config.policy.folder or config.warm_start.checkpoint
    if folder is not None:
        return Path(folder).expanduser()
    tuned = fine_tuning_of(config)
    number = 0 if isinstance(config.algorithm, LanguageSFTConfig) else tuned.run.num_iterations
    make = partial(common.make_policy, fine_tuning_workflow(tuned, ""), session, cluster, number, progress)
    return common.made_once(cache_folder(config, cluster.kind == "cpu"), make)


def cache_folder(config: MathConfig, exact_cpu: bool) -> Path:
    """Returns the cache folder of a training's small model; its name has a hash of everything that determines it."""
    data, start = config.data, asdict(config.warm_start)
    custom_template = template_text(data.prompt_template) if data.prompt_template.endswith(".jinja") else None
    key = {
        "version": _VERSION,
        "new": isinstance(config.algorithm, LanguageSFTConfig),
        "data": {"level": data.level, "prompt_template": custom_template or data.prompt_template},
        "policy": {k: v for k, v in asdict(config.policy).items() if k not in _OF_OTHER_MODELS},
        **({"tool": config.tool._target_} if config.warm_start.tool_share else {}),
        "warm_start": {
            k: v
            for k, v in start.items()
            if k not in ("cache_dir", "checkpoint", "num_held_out") and (v or k != "tool_share")
        },
        "seed": config.run.seed,
        "cpu": exact_cpu,
    }
    name = data.level.replace(",", "+")
    return common.cache_folder(config.warm_start.cache_dir, name, key, ("torch", "transformers"))


Example = tuple[list[int], list[int], list[bool]]  # prompt, completion, and which of its tokens a tool inserted


class FineTuningStage(LanguageLearner):
    """Fits the language model to examples."""

    def setup(self, context: StageContext) -> int:
        num_bytes = super().setup(context)
        assert isinstance(self._config.algorithm, LanguageSFTConfig)
        self._settings = settings = self._config.algorithm
        self._examples = {block: self._draw(Split.train, block, settings.num_examples) for block in context.blocks}
        self._held_out = {block: self._draw(Split.test, block, settings.num_held_out) for block in context.blocks}
        return num_bytes

    def _draw(self, split: Split, block: int, number: int) -> list[Example]:
        """Returns a block's examples, of `number` in all; whether one has worked steps is keyed by its number.

        Examples of more than algorithm.tokens_per_microbatch tokens are omitted.

        Raises:
            ConfigError: there are no worked steps to learn from, or too few examples.
        """
        config, settings, trains = self._config, self._settings, split is Split.train
        source = problem_source(config.data, config.run.seed if trains else config.data.seed)
        available, share = source.size(split), settings.chain_of_thought_share
        first = _FIRST if trains and available is None else 0
        size = (number if available is None else min(number, available)) // NUM_BLOCKS
        problems = source.batch(split, first + block * size, size)
        rule, action = "the config names no tool that they could call", "give tool._target_, or use 0"
        valid = config.tool._target_ is not None or not settings.tool_share
        require(valid, f"{settings.section}.tool_share", settings.tool_share, rule, action)
        rule = "no training problem has worked steps: in files they stand in the answer, before ####"
        valid = not trains or share == 0 or any(problem.solution for problem in problems)
        path = f"{settings.section}.chain_of_thought_share"
        require(valid, path, share, rule, "give such answers, or use 0")
        numbers, template = np.arange(block * size, (block + 1) * size), PromptTemplate.of(config.data)
        draws = uniform(config.run.seed, "worked" if trains else "worked/held out", numbers).tolist()
        calls, examples = ToolCalls(config.tool), list[Example]()
        for problem, draw in zip(problems, draws, strict=True):
            text = template.completion(problem, draw < share + settings.tool_share)
            turns = [(text, False)]
            if share <= draw < share + settings.tool_share:
                turns = with_calls(calls.call, problem, text)
            prompt, completion, inserted = self._encode(template, problem, turns)
            if len(prompt) + len(completion) <= settings.tokens_per_microbatch:
                examples.append((prompt, completion, inserted))
        calls.close()
        rule = (
            f"each of {NUM_BLOCKS} blocks provides half of it, and one has {len(examples)} examples of up to "
            f"{settings.tokens_per_microbatch} tokens"
        )
        enough = len(examples) >= settings.batch_size // NUM_BLOCKS or not trains
        require(enough, f"{settings.section}.batch_size", settings.batch_size, rule, "use a smaller one")
        return examples

    def _encode(self, template: PromptTemplate, problem: Problem, turns: Sequence[tuple[str, bool]]) -> Example:
        """Returns the tokens of a problem's prompt and of turns, each with whether a tool inserted it."""
        codec, completion, inserted = self._policy.codec, list[int](), list[bool]()
        chat = codec.chat(template.prompt(problem), problem.history)
        prompt = codec.encode_chat(chat)
        for text, by_tool in turns:
            chat = [*chat, {"role": "tool" if by_tool else "assistant", "content": text}]
            if by_tool:
                tokens = codec.encode_next_turn([*prompt, *completion], chat)
                rule = "the model's chat template writes earlier turns differently when a tool answers"
                path, action = f"{self._settings.section}.tool_share", "use 0, or a model with another template"
                require(tokens is not None, path, self._settings.tool_share, rule, action)
                assert tokens is not None
            else:
                tokens = [*codec.encode_answer(text), self._policy.spec.eos_ids[0]]
            completion += tokens
            inserted += [by_tool] * len(tokens)
        return prompt, completion, inserted

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the optimizer steps of an iteration; reports mean losses per token."""
        self.sends_frozen = False
        fitted = fit(self._learner, self._batches(step_context.iteration), self._passes)
        self._learner.publish()
        self.shared.version = step_context.iteration + 1
        metrics = {
            "losses/imitation_loss": fitted.loss,
            "losses/tokens": fitted.weight,
            "charts/learning_rate": self._learner.lr,
        }
        return Output(dict.fromkeys(inputs), metrics | self._held_out_loss())

    def _batches(self, iteration: int) -> Iterator[Mapping[int, Tensor]]:
        """Yields the rows of each step by block, and sets the step's learning rate."""
        settings, size = self._settings, self._settings.steps_per_iteration
        for step in range(iteration * size, min((iteration + 1) * size, settings.steps)):
            self._learner.lr = cosine_with_warmup(step, settings.steps, settings.lr)
            yield {block: self._rows(block, step) for block in self._examples}

    def _rows(self, block: int, step: int) -> Tensor:
        """Returns a block's examples of a step: the next ones of a permutation, which each epoch draws again."""
        examples, size = len(self._examples[block]), self._settings.batch_size // NUM_BLOCKS
        epoch, part = divmod(step, examples // size)
        order = permutation(self._config.run.seed, "fine-tuning", epoch, block, size=examples)
        return torch.from_numpy(order[part * size : (part + 1) * size])

    def _passes(self, rows: Mapping[int, Tensor]) -> list[Pass]:
        chosen = [self._examples[block][row] for block, index in rows.items() for row in index.tolist()]
        examples = TokenBatch.of(*zip(*chosen, strict=True))
        lengths, mask, budget = examples.lengths.tolist(), examples.mask, self._settings.tokens_per_microbatch
        packs = self._policy.packs
        batches = dynamic_batches(lengths, budget, packed=True) if packs else _microbatches(lengths, budget)
        return [Pass(float(mask[part].sum()), partial(self._loss, examples, part)) for part in batches]

    def _loss(self, examples: TokenBatch, rows: list[int]) -> LossSums:
        batch = examples.select(rows).to(self.device)
        with computing(self._settings.precision, self.device):
            loss = -self._policy.log_probs(batch, 1.0, with_entropy=False).log_probs.sum()
        return LossSums(loss, batch.mask.sum().to(torch.float32), loss.detach().reshape(1))

    def _held_out_loss(self) -> dict[str, float]:
        """Returns the loss on held-out examples, by the worker's copy of the weights."""
        sums, budget = dict[int, Tensor](), self._settings.tokens_per_microbatch
        for block, examples in self._held_out.items():
            sums[block] = torch.zeros(2)
            if examples:
                rows = TokenBatch.of(*zip(*examples, strict=True))
                log_prob = all_log_probs(self.shared.policy, rows, 1.0, budget).sum()
                sums[block] = torch.tensor([-float(log_prob), float(rows.mask.sum())])
        loss, tokens = torch.stack(list(self._reducer.gather_blocks(sums).values())).sum(0).tolist()
        return {"losses/held_out_loss": loss / tokens} if tokens else {}


def _microbatches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Returns the rows of one microbatch, or of two if separating the short rows saves enough padding.

    A batch that exceeds the budget has more microbatches.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    whole = lengths[order[0]] * len(order)
    costs = [(lengths[order[0]] * k + lengths[order[k]] * (len(order) - k), k) for k in range(1, len(order))]
    cost, cut = min(costs, default=(whole, 0))
    if cost > _MIN_WASTE * whole or whole > token_budget:
        return dynamic_batches(lengths, min(max(whole, 1), token_budget))
    return [order[:cut], order[cut:]]


def with_calls(tool: Tool, problem: Problem, text: str) -> list[tuple[str, bool]]:
    """Splits a worked answer into turns of the model (False) and answers of a tool (True).

    A turn of the model ends after an "=" if the tool's answer to it is how the text continues.
    """
    turns, start = list[tuple[str, bool]](), 0
    for end in [index + 1 for index, letter in enumerate(text) if letter == "="]:
        answer = tool(text[start:end], problem) if end > start else None
        if answer and text.startswith(answer, end):
            turns += [(text[start:end], False), (answer, True)]
            start = end + len(answer)
    return [*turns, (text[start:], False)]


def cosine_with_warmup(step: int, num_steps: int, lr: float) -> float:
    """Returns the learning rate of a step: it rises linearly, then falls as a cosine to a tenth of its peak."""
    if step < _WARMUP_STEPS:
        return lr * (step + 1) / _WARMUP_STEPS
    progress = min(1.0, (step - _WARMUP_STEPS) / max(1, num_steps - _WARMUP_STEPS))
    return lr * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * progress)))
