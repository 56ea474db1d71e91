"""Supervised fine-tuning: its stage and graph, and the warm start of other runs, which is such a run.

An iteration is some optimizer steps on direct answers and chains of thought, which lie in a fixed number of blocks.
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
_LEAST_WASTE = 0.5  # a microbatch is cut in two where more than this share of it would be padding
_VERSION = 1  # of what a cached policy depends on in addition to its key
_WARMUP_STEPS = 20
# of `policy`: what no bit of the small model depends on
_OF_OTHER_MODELS = (
    *("critic_target", "lora", "precision", "system_prompt", "chat_template_args", "packing", "checkpoint_activations"),
)
_FIRST = 1 << 39  # position in an endless stream from which examples are taken: none of them is trained on by RL


def fine_tuning_workflow(config: MathConfig, policy_folder: str) -> Workflow:
    """Returns the graph of the one stage; the folder "" stands for a new policy."""
    made = StageConfig(config, policy_folder)
    spec = StageSpec(FINE_TUNING, f"{__name__}.FineTuningStage", made, collective=True)
    return Workflow("fine-tuning", NUM_BLOCKS, {FINE_TUNING: spec})


def fine_tuning_of(config: MathConfig) -> MathConfig:
    """Returns the run of supervised fine-tuning that is the warm start."""
    # adapters of random weights would learn little; packed rows would have other last bits
    policy = replace(config.policy, lora=LoraSettings(rank=0), precision=Precision.float32, packing=False)
    run = replace(config.run, num_iterations=config.warm_start.num_iterations)
    return replace(config, policy=policy, algorithm=config.warm_start, run=run)


def starting_policy(config: MathConfig, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
    """Returns the folder that a training starts from: a given one, or that of a small model, kept in the cache.

    The small model is fine-tuned, unless the training is the fine-tuning itself.
    """
    given = config.policy.folder or config.warm_start.checkpoint
    if given is not None:
        return Path(given).expanduser()
    tuned = fine_tuning_of(config)
    number = 0 if isinstance(config.algorithm, LanguageSFTConfig) else tuned.run.num_iterations
    make = partial(common.make_policy, fine_tuning_workflow(tuned, ""), session, cluster, number, progress)
    return common.made_once(cache_folder(config, cluster.kind == "cpu"), make)


def cache_folder(config: MathConfig, exact_cpu: bool) -> Path:
    """Returns where the small model that a training starts from is cached: keyed by all that it is a function of."""
    data, start = config.data, asdict(config.warm_start)
    own = template_text(data.prompt_template) if data.prompt_template.endswith(".jinja") else None
    key = {
        "version": _VERSION,
        "new": isinstance(config.algorithm, LanguageSFTConfig),
        "data": {"level": data.level, "prompt_template": own or data.prompt_template},
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


Example = tuple[list[int], list[int], list[bool]]  # prompt; completion, and which of its tokens a tool gives


def token_batch(examples: Sequence[Example]) -> TokenBatch:
    """Returns examples as the rows of a batch."""
    return TokenBatch.of(*zip(*examples, strict=True))


class FineTuningStage(LanguageLearner):
    """Fits the language model to examples."""

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        assert isinstance(self._config.algorithm, LanguageSFTConfig)
        self._settings = settings = self._config.algorithm
        self._examples = {block: self._drawn(Split.train, block, settings.num_examples) for block in context.blocks}
        self._held_out = {block: self._drawn(Split.test, block, settings.num_held_out) for block in context.blocks}

    def _drawn(self, split: Split, block: int, number: int) -> list[Example]:
        """Returns the examples of a block, of `number` in all; whether one shows its steps is keyed by its number.

        Those of more than algorithm.tokens_per_microbatch are left out.

        Raises:
            ConfigError: there are no worked steps to learn from, or too few examples.
        """
        config, settings, policy, trains = self._config, self._settings, self._policy, split is Split.train
        source = problem_source(config.data, config.run.seed if trains else config.data.seed)
        available, share = source.size(split), settings.chain_of_thought_share
        first = _FIRST if trains and available is None else 0
        size = (number if available is None else min(number, available)) // NUM_BLOCKS
        problems = source.batch(split, first + block * size, size)
        rule = "no training problem has worked steps: in files they stand in the answer, before ####"
        wanted, rule_of_tool = settings.tool_share > 0, "no tool could be called in them"
        there, action = config.tool._target_ is not None or not wanted, "give tool._target_, or use 0"
        require(there, f"{settings.section}.tool_share", settings.tool_share, rule_of_tool, action)
        action, worked = "give such answers, or use 0", share == 0 or any(problem.solution for problem in problems)
        require(worked or not trains, f"{settings.section}.chain_of_thought_share", share, rule, action)
        numbers, template = np.arange(block * size, (block + 1) * size), PromptTemplate.of(config.data)
        drawn = uniform(config.run.seed, "worked" if trains else "worked/held out", numbers).tolist()
        called, tool = share + settings.tool_share, ToolCalls.of(config.tool) if wanted else None
        most, found = settings.tokens_per_microbatch, list[Example]()
        for problem, number in zip(problems, drawn, strict=True):
            text = template.completion(problem, number < called)
            if tool is None or not share <= number < called:
                parts = [(text, False)]
            else:
                parts = with_calls(tool.call, problem, text)
            chat, row, mask = policy.codec.chat(template.prompt(problem), problem.history), list[int](), list[bool]()
            prompt = policy.codec.encode_chat(chat)
            for part, said in parts:
                chat = [*chat, {"role": "tool" if said else "assistant", "content": part}]
                tokens = (
                    policy.codec.encode_next_turn([*prompt, *row], chat) if said else policy.encode_completion(part)
                )
                rule = "the model's chat template writes earlier turns differently when a tool answers"
                action = "use 0, or a model with another template"
                require(tokens is not None, f"{settings.section}.tool_share", settings.tool_share, rule, action)
                row, mask = [*row, *(tokens or [])], [*mask, *[said] * len(tokens or [])]
            if len(prompt) + len(row) <= most:
                found.append((prompt, row, mask))
        if tool is not None:
            tool.close()
        rule = f"each of {NUM_BLOCKS} blocks gives half of it, and one has {len(found)} examples of up to {most} tokens"
        enough = len(found) >= settings.batch_size // NUM_BLOCKS or not trains
        require(enough, f"{settings.section}.batch_size", settings.batch_size, rule, "use a smaller one")
        return found

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the steps of an iteration; reports mean losses per token."""
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
        """The examples of a block in a step: the next ones of a permutation that is redrawn when it is used up."""
        examples, part = len(self._examples[block]), self._settings.batch_size // NUM_BLOCKS
        epoch, place = divmod(step, examples // part)
        order = permutation(self._config.run.seed, "fine-tuning", epoch, block, size=examples)
        return torch.from_numpy(order[place * part : (place + 1) * part])

    def _passes(self, block: int, index: Tensor) -> list[Pass]:
        chosen = token_batch([self._examples[block][row] for row in index.tolist()])
        lengths, sampled, budget = chosen.lengths.tolist(), chosen.mask, self._settings.tokens_per_microbatch
        parts = dynamic_batches(lengths, budget, packed=True) if self._policy.packs else _parts(lengths, budget)
        return [Pass(float(sampled[rows].sum()), partial(self._loss, chosen, rows)) for rows in parts]

    def _loss(self, chosen: TokenBatch, rows: list[int]) -> LossSums:
        batch = chosen.select(rows).to(self.device)
        with computing(self._settings.precision, self.device):
            found = self._policy.log_probs(batch, 1.0, with_entropy=False)
        loss = -found.log_probs.sum()
        return LossSums(loss, batch.mask.sum().to(torch.float32), loss.detach().reshape(1))

    def _held_out_loss(self) -> dict[str, float]:
        """Returns the loss of examples that nothing is learned from, by the weights that other stages read."""
        sums, most = dict[int, Tensor](), self._settings.tokens_per_microbatch
        for block, examples in self._held_out.items():
            sums[block] = torch.zeros(2)
            if examples:
                rows = token_batch(examples)
                found = all_log_probs(self.shared.policy, rows, 1.0, most).sum()
                sums[block] = torch.tensor([-float(found), float(rows.mask.sum())])
        loss, tokens = torch.stack(list(self._reducer.gather_blocks(sums).values())).sum(0).tolist()
        return {"losses/held_out_loss": loss / tokens} if tokens else {}


def _parts(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Returns the rows of one or two microbatches: direct answers have a separate one where it saves padding.

    There are more where one would exceed the budget.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    whole = lengths[order[0]] * len(order)
    cuts = [(lengths[order[0]] * k + lengths[order[k]] * (len(order) - k), k) for k in range(1, len(order))]
    best, at = min(cuts, default=(whole, 0))
    if best > _LEAST_WASTE * whole or whole > token_budget:
        return dynamic_batches(lengths, min(max(whole, 1), token_budget))
    return [order[:at], order[at:]]


def with_calls(tool: Tool, problem: Problem, text: str) -> list[tuple[str, bool]]:
    """Returns a worked answer as turns of the model (False) and answers of a tool (True), by what the tool says.

    The model's turn ends where the tool's answer is what follows in the text: behind an "=", for a calculator.
    """
    parts, start = list[tuple[str, bool]](), 0
    for at in [place + 1 for place, letter in enumerate(text) if letter == "="]:
        said = tool(text[start:at], problem) if at > start else None
        if said and text.startswith(said, at):
            parts += [(text[start:at], False), (said, True)]
            start = at + len(said)
    return [*parts, (text[start:], False)]


def cosine_with_warmup(step: int, num_steps: int, lr: float) -> float:
    """Returns the learning rate of a step: it rises linearly, then falls as a cosine to a tenth of its peak."""
    if step < _WARMUP_STEPS:
        return lr * (step + 1) / _WARMUP_STEPS
    done = min(1.0, (step - _WARMUP_STEPS) / max(1, num_steps - _WARMUP_STEPS))
    return lr * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * done)))
