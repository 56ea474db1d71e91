"""Stages that hold the language model: generation, and log-probs of finished completions.

Generation decodes several blocks as one batch, and returns each block when its episodes have ended:

    batch   blocks 0 1 2 3 of one worker, whose prompts are submitted to the engine together
    call    for some blocks, in ascending order: decodes until these blocks have ended, and no further.  The next call
            continues from there, so that a downstream stage has work while long completions are decoded

On a CPU the block numbers alone determine which rows decode together, never the plan.  On accelerators, and with
episodes.free, all batches of a call decode together, so that no slot waits for the end of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import cast

from rlinf_embodied.config import MathConfig
from rlinf_embodied.device import computing, name_of
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.learning.weights import WeightsUser
from rlinf_embodied.plug_ins import load_plug_in
from rlinf_embodied.reasoning.batch import (
    Batch,
    Completions,
    EngineLoad,
    GenerationBlock,
    LogProbs,
    Prompt,
    all_log_probs,
    generation_report,
)
from rlinf_embodied.reasoning.engine import Engine, GeneratedTurn, generate, update
from rlinf_embodied.reasoning.episode_runner import EpisodeRunner
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.policy_folder import REFERENCE, StageConfig, sampling_copy, shared_model
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


class LanguageStage(WeightsUser[LanguagePolicy]):
    """A stage that holds the language model; stages of one worker share a copy."""

    def __init__(self, stage_config: StageConfig) -> None:
        self._stage_config, self._config = stage_config, stage_config.config

    def setup(self, context: StageContext) -> None:
        """Loads the model, unless another stage of the worker has loaded it."""
        self._shared = shared_model(context, self._stage_config)
        self._shared.enter(self._user)
        self._device = context.device


class GenerationStage(LanguageStage):
    """Samples completions with keyed noise."""

    _user = "generation"

    def __init__(self, stage_config: StageConfig) -> None:
        super().__init__(sampling_copy(stage_config))
        self._in_process = stage_config.config.generation.engine != "vllm"  # whether the engine uses the stage's copy

    def setup(self, context: StageContext) -> None:
        """Takes the worker's copy of the model, or in bfloat16 loads a separate one; creates the engine."""
        super().setup(context)
        if not self._in_process:
            self._shared.leave(self._user)  # before vLLM's server measures the device's free memory
        names = name_of(context.device), *context.lent
        self._engine = engine_of(self._config, self._shared.policy, self._shared.version, names)
        self._load = EngineLoad()  # turn by turn
        self._runner = EpisodeRunner(self._config, self._shared.policy.codec, self._engine)  # not for `step`

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the Completions of each block."""
        start, runner, free = time.perf_counter(), self._runner, self._config.episodes.free
        outputs, finish_s, size = dict[int, Completions](), dict[int, float](), self._config.blocks_per_batch
        batches = {block: cast("list[Batch]", inputs[block])[0] for block in sorted(inputs)}
        update(self._engine, self._shared.version, self._shared.policy)
        runner.enter(step_context.attempt, step_context.iteration, step_context.round)
        self._engine.resume()
        for block, batch in batches.items() if free or self._device != "cpu" else ():
            runner.begin(block - block % size, batch)
        for block, batch in batches.items():
            runner.begin(block - block % size, batch)
            while (completions := runner.take(block)) is None:
                runner.advance()
            outputs[block], finish_s[block] = completions, time.perf_counter() - start
        if free:
            self._engine.pause()
        return Output(outputs, generation_report(outputs.values(), finish_s, [runner.load.take()]))

    # ----------------------------------------------------------------------------------- in a loop with EpisodeStage
    def step(self, step_context: StepContext, turns: Mapping[int, Mapping[int, Prompt]]) -> Mapping[int, GeneratedTurn]:
        """Generates a turn of each block.

        Only the rows of one block decode together, so that the plan has no influence.
        """
        update(self._engine, self._shared.version, self._shared.policy)
        settings, answers = (self._config.generation, self._config.run.seed, step_context.iteration), {}
        for block, turn in turns.items():
            requests = GenerationBlock(tuple(turn.values()), *settings)
            rows = generate(self._engine, requests, self._load) if turn else []
            answers[block] = GeneratedTurn(dict(zip(turn, rows, strict=True)), self._engine.version, self._load.take())
        return answers

    def close(self, step_context: StepContext, last: Mapping[int, object]) -> Output:
        """Returns nothing: EpisodeStage has the episodes."""
        return Output(dict.fromkeys(last))

    def onload(self, step_context: object) -> None:
        if self._in_process:
            super().onload(step_context)

    def leave(self) -> None:
        self._runner.close()
        self._engine.close()


def engine_of(config: MathConfig, policy: LanguagePolicy, version: int, devices: Sequence[str]) -> Engine:
    """Returns an engine with a policy's weights: the exact one, vLLM's, or of the class that generation.engine names.

    `devices` are the devices of the worker, named as in CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: a setting is unknown, or software is missing.
    """
    name = config.generation.engine
    if name == "exact":
        return ExactEngine(policy, version)
    target = "rlinf_embodied.reasoning.vllm_engine.VllmEngine" if name == "vllm" else name
    engine_class = load_plug_in(target, "generation.engine", "config", "policy", "version", "devices")
    return cast(Engine, engine_class(config, policy, version, devices))


class LogProbStage(LanguageStage):
    """Computes log-probs of completions under the weights that sampled them, or under the starting policy.

    The former are the ratio's denominator if an iteration makes more than one optimizer step.  They are computed by the
    training code, in training's microbatches; with one step the actor's forward pass provides them.  If adapters are
    trained, the starting policy is the same model with adapters switched off.
    """

    def __init__(self, stage_config: StageConfig) -> None:
        super().__init__(stage_config)
        self._user = "start" if stage_config.without_adapters else "log-probs"

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the LogProbs of each block."""
        algorithm, version, outputs = self._config.algorithm, self._shared.version, {}
        settings = self._config.generation.temperature, algorithm.tokens_per_microbatch
        without_adapters = self._stage_config.without_adapters
        is_reference = without_adapters or self._stage_config.share == REFERENCE
        if not is_reference and step_context.runs_ahead:  # weights may be older: the actor computes the log-probs
            return Output(dict.fromkeys(inputs, LogProbs(None, version)))
        policy = self._shared.policy
        for block, (completions,) in cast("Mapping[int, list[Completions]]", inputs).items():
            adapters = policy.without_adapters() if without_adapters else nullcontext()
            with computing(algorithm.precision, self._device), adapters:
                log_probs = all_log_probs(policy, completions.rows, *settings)
            outputs[block] = LogProbs(log_probs, version)
        return Output(outputs)
