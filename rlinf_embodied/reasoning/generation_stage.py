"""Stages that hold the language model: generation, and log-probs of finished completions.

Generation decodes the blocks of a batch at once, and hands each on when its episodes have ended:

    set     blocks 0 1 2 3 of one worker, whose prompts the engine gets together
    call    for some blocks, ascending: decodes until these are there, and no further; the next call continues where
            this one stopped, so that a stage downstream has work while long completions are decoded

On a CPU the block numbers alone determine which rows decode together, never the plan.  On accelerators, and with
episodes.free, the sets of a call decode together, so that no slot waits for the end of a set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch

from rlinf_embodied.config import Precision
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.learning.weights import SharedPolicy, WeightsUser
from rlinf_embodied.reasoning.batch import (
    Batch,
    Completions,
    GenerationBlock,
    LogProbs,
    Turn,
    all_log_probs,
    generation_report,
)
from rlinf_embodied.reasoning.engine import Generated, engine_of, generate, update
from rlinf_embodied.reasoning.episode_runner import EpisodeRunner
from rlinf_embodied.reasoning.policy_folder import StageConfig, load_policy
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


def shared_model(context: StageContext, made: StageConfig) -> SharedPolicy[LanguagePolicy]:
    """Returns the worker's copy of a model, loaded on first use."""
    config = made.config
    make = lambda: load_policy(config.policy, made.folder, config.run.seed, context.device)  # noqa: E731
    return cast(SharedPolicy[LanguagePolicy], context.share(made.share, make))


class LanguageStage(WeightsUser[LanguagePolicy]):
    """A stage that holds a copy of the language model, or uses that of its worker's actor."""

    def __init__(self, made: StageConfig) -> None:
        self._made, self._config = made, made.config

    def setup(self, context: StageContext) -> None:
        """Loads the model, or takes the worker's copy."""
        self._shared = shared_model(context, self._made)
        self._shared.enter(self._user)
        self._device = context.device


class GenerationStage(LanguageStage):
    """Samples completions with keyed noise."""

    _user = "generation"

    def __init__(self, made: StageConfig) -> None:
        super().__init__(made)
        if made.config.generation.precision is Precision.bfloat16:
            self._made = replace(made, share="generation")

    def setup(self, context: StageContext) -> None:
        """Loads the model, or takes the worker's copy, in bfloat16 one of its own; and makes the engine."""
        super().setup(context)
        if self._config.generation.precision is Precision.bfloat16:
            for parameter in self._shared.policy.module.parameters():  # buffers, as of rotary embeddings, stay exact
                parameter.data = parameter.data.to(torch.bfloat16)
        self._engine = engine_of(self._config, self._shared.policy, self._shared.version)
        self._runner: EpisodeRunner | None = None  # of episodes that are no loop of stages
        if not self._config.has_loop:
            self._runner = EpisodeRunner(self._config, self._shared.policy.codec, self._engine)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Completions of each block."""
        assert self._runner is not None
        start, runner, free = time.perf_counter(), self._runner, self._config.episodes.free
        made, finish_s, size = dict[int, Completions](), dict[int, float](), self._config.blocks_per_batch
        asked = {block: cast("list[Batch]", inputs[block])[0] for block in sorted(inputs)}
        update(self._engine, self._shared.version, self._shared.policy)
        runner.enter(step_context.attempt, step_context.iteration, step_context.round)
        self._engine.resume()
        for block, batch in asked.items() if free or self._device != "cpu" else ():
            runner.begin(block - block % size, batch)
        for block, batch in asked.items():
            runner.begin(block - block % size, batch)
            while (found := runner.take(block)) is None:
                runner.advance()
            made[block], finish_s[block] = found, time.perf_counter() - start
        if free:
            self._engine.pause()
        return Output(made, generation_report(made.values(), finish_s, runner.load.take()))

    # ----------------------------------------------------------------------------------- in a loop with EpisodeStage
    def step(
        self, step_context: StepContext, turns: Mapping[int, Turn | None]
    ) -> Mapping[int, tuple[dict[int, Generated], int] | None]:
        """Returns what the model writes in a turn of each block, by the episodes' numbers, and its weights' version.

        A block's rows decode together and with no others, so that the plan has no influence.
        """
        update(self._engine, self._shared.version, self._shared.policy)
        return {block: None if turn is None else self._written(step_context, turn) for block, turn in turns.items()}

    def _written(self, step_context: StepContext, turn: Turn) -> tuple[dict[int, Generated], int]:
        sampling, seed = self._config.generation, self._config.run.seed
        requests = GenerationBlock(turn.prompts, turn.group_size, sampling, seed, step_context.iteration)
        return dict(zip(turn.numbers, generate(self._engine, requests), strict=True)), self._engine.version

    def close(self, step_context: StepContext, last: Mapping[int, object]) -> Output:
        """Returns nothing: the other side has the episodes."""
        return Output(dict.fromkeys(last))

    def leave(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._engine.close()


class LogProbStage(LanguageStage):
    """Reads completions once, without gradients: under the weights that sampled them, or under those of the start.

    The former are what a ratio is formed with where an iteration makes more than one optimizer step.  They come from
    the training code, in training's batches; with one step the actor's own forward pass gives them for nothing.  The
    start of a training of adapters is its model without them, not another copy.
    """

    def __init__(self, made: StageConfig) -> None:
        super().__init__(made)
        self._user = "start" if made.without_adapters else "log-probs"

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the LogProbs of each block."""
        algorithm, version, made = self._config.algorithm, self._shared.version, {}
        settings = self._config.generation.temperature, algorithm.tokens_per_microbatch
        start = self._made.without_adapters or self._made.share == "reference"
        if not start and step_context.runs_ahead:  # of older weights: the actor computes them
            return Output(dict.fromkeys(inputs, LogProbs(None, version)))
        policy = self._shared.policy
        for block, (completions,) in cast("Mapping[int, list[Completions]]", inputs).items():
            as_it_was = policy.without_adapters() if self._made.without_adapters else nullcontext()
            with computing(algorithm.precision, self._device), as_it_was:
                found = all_log_probs(policy, completions.rows, *settings)
            made[block] = LogProbs(found, version)
        return Output(made)
