"""Stages that hold the language model: generation, and log-probs of finished completions.

Generation decodes the blocks of a batch at once, and hands each on when its groups have ended:

    set     blocks 0 1 2 3 of one worker: requests to an engine, whose groups come in the order of their prompts
    call    for some blocks, ascending: decodes until their groups are there, and no further; the next call continues
            where this one stopped, so that a stage downstream has work while long completions are decoded

On a CPU the block numbers alone determine which rows decode together, never the plan.  On accelerators the sets
of a call decode together, so that no slot waits for the end of a set.  With episodes.free all sets do, and the stage
runs whole episodes (free_running.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import cast

import torch

from rlinf_embodied.config import Precision
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.learning.weights import SharedPolicy, WeightsUser
from rlinf_embodied.reasoning.batch import (
    Completions,
    EngineLoad,
    GenerationBlock,
    Group,
    LogProbs,
    PromptSet,
    Sequences,
    Turn,
    all_log_probs,
    generation_report,
)
from rlinf_embodied.reasoning.engine import engine_of, generate, update
from rlinf_embodied.reasoning.free_running import FreeRunning
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

    def _completions(self, problems: Sequence[Problem], groups: Iterator[Group]) -> Completions:
        """Returns the next groups, one for each problem, with their texts."""
        found = tuple(islice(groups, len(problems)))
        assert len(found) == len(problems), "blocks of a set are asked for once, in ascending order"
        rows = Sequences.of(found).completions
        texts = tuple(self._shared.policy.decode(row) for row in rows)
        return Completions(tuple(problems), found, texts, self._shared.version)


class GenerationStage(LanguageStage):
    """Samples completions with keyed noise."""

    _user = "generation"

    def __init__(self, made: StageConfig) -> None:
        super().__init__(made)
        self._under_way: tuple[tuple[int, ...], dict[int, Iterator[Group]]] = (), {}  # key, by the set's first block
        if made.config.generation.precision is Precision.bfloat16:
            self._made = replace(made, share="generation")

    def setup(self, context: StageContext) -> None:
        """Loads the model, or takes the worker's copy, in bfloat16 one of its own; and makes the engine."""
        super().setup(context)
        if self._config.generation.precision is Precision.bfloat16:
            for parameter in self._shared.policy.module.parameters():  # buffers, as of rotary embeddings, stay exact
                parameter.data = parameter.data.to(torch.bfloat16)
        self._engine = engine_of(self._config, self._shared.policy, self._shared.version)
        self._load, free = EngineLoad(), self._config.episodes.free
        settings = self._config, self._shared.policy.codec, self._engine, self._load
        self._free = FreeRunning(*settings) if free else None

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Completions of each block."""
        if self._free is not None:
            return self._run_free(self._free, step_context, inputs)
        key = (step_context.iteration, step_context.attempt, step_context.round)
        if self._under_way[0] != key:
            self._under_way = key, {}
            self._engine.abort()
        start, made, finish_s = time.perf_counter(), {}, {}
        asked = {block: cast("list[PromptSet]", inputs[block])[0] for block in sorted(inputs)}
        for block, prompts in asked.items():
            decoding, first = self._under_way[1], block - prompts.index
            if first not in decoding:
                decoding |= self._begun(step_context, first, asked)
            made[block] = self._completions([problem for problem, _ in prompts.blocks[prompts.index]], decoding[first])
            if prompts.index == len(prompts.blocks) - 1:
                del decoding[first]  # the last one frees its memory
            finish_s[block] = time.perf_counter() - start
        return Output(made, generation_report(made.values(), finish_s, self._load.take()))

    def _begun(
        self, step_context: StepContext, first: int, asked: Mapping[int, PromptSet]
    ) -> dict[int, Iterator[Group]]:
        """Begins to decode a set, on accelerators with all sets that this call asks for from there on.

        On a CPU the rows that decode together may not depend on the plan: their number changes the last bits.
        """
        sets = {block - prompts.index: prompts for block, prompts in asked.items() if block - prompts.index >= first}
        if self._device == "cpu":
            sets = {first: sets[first]}
        prompts = tuple(prompt for prompts in sets.values() for block in prompts.blocks for _, prompt in block)
        turn = Turn(prompts, self._config.rl.group_size)
        return dict.fromkeys(sets, self._generated(step_context, turn))

    def _generated(self, step_context: StepContext, turn: Turn) -> Iterator[Group]:
        sampling, seed = self._config.generation, self._config.run.seed
        block = GenerationBlock(turn.prompts, turn.group_size, sampling, seed, step_context.iteration)
        update(self._engine, self._shared.version, self._shared.policy)
        return generate(self._engine, block, self._load)

    def _run_free(self, free: FreeRunning, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        start, made, finish_s = time.perf_counter(), dict[int, Completions](), {}
        begun, key = self._under_way[0], (step_context.iteration, step_context.attempt)
        self._under_way = key, {}
        if begun[1:] != key[1:]:  # of an attempt that was given up
            free.clear()
        update(self._engine, self._shared.version, self._shared.policy)
        asked = {block: cast("list[PromptSet]", inputs[block])[0] for block in sorted(inputs)}
        for block, prompts in asked.items():
            for k, part in enumerate(prompts.blocks):
                free.begin(block - prompts.index + k, part, step_context.iteration)
        if begun != key:
            free.renew(step_context.iteration)
        self._engine.resume()
        for block in asked:
            while (found := free.take(block)) is None:
                free.advance()
            made[block], finish_s[block] = found, time.perf_counter() - start
        self._engine.pause()
        return Output(made, generation_report(made.values(), finish_s, self._load.take()))

    # ----------------------------------------------------------------------------------- in a loop with EpisodeStage
    def step(
        self, step_context: StepContext, turns: Mapping[int, Turn | None]
    ) -> Mapping[int, tuple[tuple[Group, ...], int] | None]:
        """Returns what the model writes in a turn of each block, and the version of its weights.

        A block's rows decode together and with no others, so that the plan has no influence.
        """
        made = lambda turn: (tuple(self._generated(step_context, turn)), self._engine.version)  # noqa: E731
        return {block: None if turn is None else made(turn) for block, turn in turns.items()}

    def close(self, step_context: StepContext, last: Mapping[int, object]) -> Output:
        """Returns nothing: the other side has the episodes."""
        return Output(dict.fromkeys(last))

    def leave(self) -> None:
        if self._free is not None:
            self._free.close()
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
                found = all_log_probs(policy, Sequences.of(completions.groups), *settings)
            made[block] = LogProbs(found, version)
        return Output(made)
