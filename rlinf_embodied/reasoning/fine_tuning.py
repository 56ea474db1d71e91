"""What a training starts from: a model folder, a checkpoint, or a small model fine-tuned once and cached.

Fine-tuning is a stage: direct answers and chains of thought to generated problems, block by block.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import LoraSettings, MathConfig
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.prompt_templates import PROMPT_TEMPLATES
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, Learner
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.randomness import permutation, uniform
from rlinf_embodied.reasoning.batch import Sequences, dynamic_batches
from rlinf_embodied.reasoning.policy_folder import load_policy, save_policy
from rlinf_embodied.runtime.host import StageContext, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.training import warm_start as common
from rlinf_embodied.workflow.graph import StageSpec, Workflow

NUM_BLOCKS = 2  # of examples: fixed, so that weights do not depend on the number of devices
_LEAST_WASTE = 0.5  # a microbatch is cut in two where more than this share of it would be padding
_VERSION = 1  # of what a cached policy depends on in addition to its key
_STAGE = StageSpec("fine_tuning", f"{__name__}.FineTuningStage", None, collective=True)
_STEPS_PER_CALL, _WARMUP_STEPS = 50, 20
_OF_OTHER_MODELS = ("critic_target", "lora", "precision", "system_prompt", "chat_template_args")  # of `policy`
_FIRST = 1 << 39  # position in the training stream from which examples are taken: none of them is trained on by RL


def starting_policy(config: MathConfig, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
    """Returns the folder that a training starts from: a given one, or that of a model that is fine-tuned now.

    That one is kept in the cache.
    """
    given = config.policy.folder or config.warm_start.checkpoint
    if given is not None:
        return Path(given).expanduser()

    def teach(executor: Executor) -> None:
        total = config.warm_start.steps
        for first in range(0, total, _STEPS_PER_CALL):
            last = min(first + _STEPS_PER_CALL, total)
            loss = executor.call(_STAGE.name, "fit", StepContext(first), (first, last))[0]
            progress("fine-tuning", last, total, f"loss {loss:.3f}")

    workflow = Workflow("warm start", NUM_BLOCKS, {_STAGE.name: replace(_STAGE, config=config)})
    make = lambda folder: common.make_policy(folder, workflow, _STAGE.name, session, cluster, teach)  # noqa: E731
    return common.made_once(cache_folder(config, cluster.kind == "cpu"), make)


def cache_folder(config: MathConfig, exact_cpu: bool) -> Path:
    """Returns where the fine-tuned model of this configuration is cached: keyed by all that it is a function of."""
    key = {
        "version": _VERSION,
        "data": {"level": config.data.level, "prompt_template": config.data.prompt_template},
        "policy": {k: v for k, v in asdict(config.policy).items() if k not in _OF_OTHER_MODELS},
        "warm_start": {k: v for k, v in asdict(config.warm_start).items() if k not in ("cache_dir", "checkpoint")},
        "seed": config.run.seed,
        "cpu": exact_cpu,
    }
    name = config.data.level.replace(",", "+")
    return common.cache_folder(config.warm_start.cache_dir, name, key, ("torch", "transformers"))


class FineTuningStage:
    """Fits a new model to examples; one call per some steps, so that a progress bar can move."""

    def __init__(self, config: MathConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Makes the model, the examples of this worker's blocks, and the learner."""
        config = self._config
        whole = replace(config.policy, lora=LoraSettings(rank=0))  # adapters of random weights would learn little
        self._policy = load_policy(whole, None, config.run.seed, context.device).policy
        self._device, self._rank = context.device, context.group.rank
        self._examples = {block: self._drawn(block) for block in context.blocks}
        adam = AdamSettings(config.warm_start.lr, (0.9, 0.98), max_grad_norm=1.0, weight_decay=0.01)
        reducer = Reducer(context.group, context.owners)
        self._learner = Learner(self._policy.parameters(), adam, ("loss",), reducer)

    def _drawn(self, block: int) -> Sequences:
        """Returns the examples of a block; whether one shows its steps is keyed by its number."""
        config, policy, size = self._config, self._policy, self._config.warm_start.num_examples // NUM_BLOCKS
        source, template = problem_source(config.data, config.run.seed), PROMPT_TEMPLATES[config.data.prompt_template]
        problems = source.batch(Split.train, _FIRST + block * size, size)
        drawn = uniform(config.run.seed, "worked", np.arange(block * size, (block + 1) * size))
        with_steps = (drawn < config.warm_start.chain_of_thought_share).tolist()
        texts = [template.completion(*example) for example in zip(problems, with_steps, strict=True)]
        prompts = [tuple(policy.encode(template.prompt(problem))) for problem in problems]
        return Sequences(tuple(prompts), tuple(tuple(policy.encode_completion(text)) for text in texts))

    def fit(self, step_context: StepContext, steps: tuple[int, int]) -> float:
        """Makes the steps [first, last) and returns the mean loss per token."""
        settings, total, count = self._config.warm_start, 0.0, 0.0
        for step in range(*steps):
            self._learner.lr = cosine_with_warmup(step, settings.steps, settings.lr)
            rows = {block: self._rows(block, step) for block in self._examples}
            made = self._learner.step(rows, self._passes)
            total, count = total + made.sums["loss"], count + made.weight
        return total / count

    def _rows(self, block: int, step: int) -> Tensor:
        """The examples of a block in a step: the next ones of a permutation that is redrawn when it is used up."""
        examples, part = len(self._examples[block]), self._config.warm_start.batch_size // NUM_BLOCKS
        epoch, place = divmod(step, examples // part)
        order = permutation(self._config.run.seed, "fine-tuning", epoch, block, size=examples)
        return torch.from_numpy(order[place * part : (place + 1) * part])

    def _passes(self, block: int, index: Tensor) -> list[Pass]:
        chosen = self._examples[block].select(index.tolist())
        parts = _parts(chosen.lengths())
        return [Pass(float(chosen.num_tokens(rows)), partial(self._loss, chosen, rows)) for rows in parts]

    def _loss(self, chosen: Sequences, rows: list[int]) -> LossSums:
        batch = chosen.batch(rows, self._policy.spec.pad_id).to(self._device)
        found = self._policy.log_probs(batch, 1.0, with_entropy=False)
        loss = -found.log_probs.sum()
        return LossSums(loss, batch.mask.sum().to(torch.float32), loss.detach().reshape(1))

    def save_policy(self, step_context: StepContext, folder: str) -> None:
        """Writes the policy (the first worker does)."""
        if self._rank == 0:
            save_policy(self._policy, Path(folder), self._config)


def _parts(lengths: list[int]) -> list[list[int]]:
    """Returns the rows of one or two microbatches: direct answers have a separate one where it saves padding."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    whole = lengths[order[0]] * len(order)
    cuts = [(lengths[order[0]] * k + lengths[order[k]] * (len(order) - k), k) for k in range(1, len(order))]
    best, at = min(cuts, default=(whole, 0))
    if best > _LEAST_WASTE * whole:
        return dynamic_batches(lengths, max(whole, 1))
    return [order[:at], order[at:]]


def cosine_with_warmup(step: int, num_steps: int, lr: float) -> float:
    """Returns the learning rate of a step: it rises linearly, then falls as a cosine to a tenth of its peak."""
    if step < _WARMUP_STEPS:
        return lr * (step + 1) / _WARMUP_STEPS
    done = min(1.0, (step - _WARMUP_STEPS) / max(1, num_steps - _WARMUP_STEPS))
    return lr * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * done)))
