"""Generation hands blocks on while others are still decoded, and what downstream makes of them in the meantime."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from language_models import MODELS, language_model
from math_runs import TWO_STEPS, tiny_math
from placements import leaves
from runs import clone, cluster, executor_for, iterate, job_of

from policies import causal_lm
from policies.lean_decoding import LeanDecoder
from rlinf_embodied.config import MathConfig, Precision
from rlinf_embodied.device import computing
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning import weights
from rlinf_embodied.learning.optimizer import FlatOptimizer
from rlinf_embodied.reasoning import generation_stage, policy_folder
from rlinf_embodied.reasoning.batch import Batch, Completions, all_log_probs
from rlinf_embodied.reasoning.generation_stage import GenerationStage
from rlinf_embodied.reasoning.objective import Objective
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Position, PromptStage
from rlinf_embodied.reasoning.reward_stage import RewardStage
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.running import Running

BLOCKS = range(4)  # two sets of two


@pytest.fixture
def decoder_steps(monkeypatch) -> list[int]:
    """Rows of every step that a decoder makes, as they are made."""
    made: list[int] = []
    original = LeanDecoder.step

    def step(self, tokens):
        made.append(len(tokens))
        return original(self, tokens)

    monkeypatch.setattr(LeanDecoder, "step", step)
    return made


def stage_of(config: MathConfig) -> GenerationStage:
    stage = GenerationStage(StageConfig(config, str(clone(config))))
    stage.setup(solo_context(BLOCKS))
    return stage


def prompts_of(config: MathConfig, start: int | None = 0, iteration: int = 0) -> dict[int, list[object]]:
    stage = PromptStage(StageConfig(config, str(clone(config))))
    stage.setup(solo_context(BLOCKS))
    at = StepContext(iteration, message=None if start is None else Position(start))
    output = stage.run(at, {block: [] for block in BLOCKS})
    return {block: [payload] for block, payload in output.blocks.items()}


def same(one: object, other: object, tolerance: float = 0.0) -> None:
    assert isinstance(one, Completions)
    assert isinstance(other, Completions)
    assert (one.problems, one.texts, one.version) == (other.problems, other.texts, other.version)
    assert torch.equal(one.rows.tokens, other.rows.tokens)
    assert (one.log_probs - other.log_probs).abs().max() <= tolerance


def test_a_copy_in_bfloat16_reaches_its_device_in_that_precision(monkeypatch):
    config = tiny_math("generation.precision=bfloat16")
    stage, moved = GenerationStage(StageConfig(config, str(clone(config)))), []
    for module in (policy_folder, weights):
        monkeypatch.setattr(module, "move", lambda model, _: moved.append({p.dtype for p in model.parameters()}))
    stage.setup(solo_context(BLOCKS))
    assert moved
    assert all(dtypes == {torch.bfloat16} for dtypes in moved)


def test_evaluations_use_generations_copy_in_bfloat16_and_no_worker_reads_another_in_float32(tmp_path, monkeypatch):
    config, session, read, original = (
        tiny_math("generation.precision=bfloat16"),
        SerialSession(),
        [],
        causal_lm.read_model,
    )
    plan = leaves(prompts=[0], generation=[1], reward=[0], old_log_probs_optional=[0], actor=[0])
    folder, job, files = str(clone(config)), job_of(config), RunFolder(tmp_path)
    monkeypatch.setattr(causal_lm, "read_model", lambda where, dtype: read.append(dtype) or original(where, dtype))
    running = Running(job, session, files, Progress(), print)
    running.executor = executor_for(config, plan, 2, session)
    running.evaluation = job.evaluation(session, cluster(2), folder, files)
    assert sorted(map(str, read)) == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    first, second = (session._hosts[worker].shared for worker in (0, 1))
    assert (set(first), set(second)) == ({"policy", "generation"}, {"generation"})
    trained = first["policy"].policy.module
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    running.executor.sync_weights()
    running._update(running.evaluation)
    for shared in (first, second):
        for name, parameter in shared["generation"].policy.module.named_parameters():
            assert torch.equal(parameter, trained.get_parameter(name).to(torch.bfloat16)), name


@pytest.mark.parametrize("name", MODELS)
def test_matrices_that_autocast_would_round_are_stored_rounded_and_log_probs_keep_their_bits(name):
    model, generator = language_model(name), torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 25, (6, 20), generator=generator)
    rows = TokenBatch(tokens, torch.full((6,), 5), torch.full((6,), 20))
    with computing(Precision.bfloat16, "cpu"):
        expected, before = all_log_probs(model, rows, 1.0, 1024), weights.state_bytes(model.module)
        policy_folder.round_matrices(model.module, Precision.bfloat16)
        assert torch.equal(all_log_probs(model, rows, 1.0, 1024), expected)
    assert weights.state_bytes(model.module) < 0.7 * before or name == "gpt2"  # its linear layers are transformers'


def test_a_reference_of_a_training_in_bfloat16_is_smaller_and_the_trained_policy_is_not():
    config = tiny_math("algorithm.precision=bfloat16", "algorithm.kl_coef=0.1")
    folder, dtypes = str(clone(config)), {}
    for share in ("policy", policy_folder.REFERENCE):
        model = policy_folder.shared_model(solo_context([0]), StageConfig(config, folder, share)).policy.module
        dtypes[share] = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {"policy": {torch.float32}, policy_folder.REFERENCE: {torch.float32, torch.bfloat16}}


def test_with_vllm_a_worker_keeps_no_copy_of_the_policy_on_its_device(monkeypatch):
    config, users = tiny_math("generation.engine=vllm", "run.exact=false"), []
    stage = GenerationStage(StageConfig(config, str(clone(config))))
    monkeypatch.setattr(generation_stage, "engine_of", lambda *_: users.append(set(stage._shared.users)))
    stage.setup(solo_context(BLOCKS))
    stage.onload(StepContext(0))
    assert users == [set()]  # when the server starts
    assert stage._shared.users == set()


def test_a_block_is_returned_before_those_after_it_are_decoded(decoder_steps):
    config = tiny_math()
    prompts = prompts_of(config)
    whole = stage_of(config).run(StepContext(0), prompts)
    in_all, steps = len(decoder_steps), []
    decoder_steps.clear()
    stage, made = stage_of(config), {}
    for block in BLOCKS:
        output = stage.run(StepContext(0, chunk=block, num_chunks=4), {block: prompts[block]})
        made |= output.blocks
        steps.append(len(decoder_steps))
    assert len(decoder_steps) == in_all  # continuing where the call before stopped costs nothing
    assert steps[1] < steps[2] <= steps[3]
    assert steps[0] < steps[1] or steps[2] < steps[3]  # within a set, too
    for block in BLOCKS:
        same(made[block], whole.blocks[block])


def test_iterations_of_a_profile_have_successive_problems():
    config = tiny_math()  # 8 prompts in an iteration
    assert prompts_of(config, None, iteration=3) == prompts_of(config, 24) != prompts_of(config, None)


def test_free_blocks_are_begun_once_where_chunks_cut_their_set():
    config = tiny_math("episodes.free=true", "run.exact=false")
    stage = stage_of(config)
    for iteration in range(2):
        prompts = prompts_of(config, 8 * iteration)
        for block in BLOCKS:
            step_context = StepContext(iteration, chunk=block, num_chunks=4)
            made = stage.run(step_context, {block: prompts[block]}).blocks[block]
            (batch,) = cast("list[Batch]", prompts[block])
            assert isinstance(made, Completions)
            assert made.problems == tuple(problem for problem, _ in batch[block % config.blocks_per_batch])
    assert stage._engine.stats() == (0, 0)


def test_sets_of_a_call_share_its_steps_on_accelerators(decoder_steps):
    """A long answer of one set holds up no slot of the next one."""
    config = tiny_math("generation.max_num_seqs=8")
    prompts, stage = prompts_of(config), stage_of(config)
    expected = stage.run(StepContext(0), prompts)
    alone = len(decoder_steps)
    decoder_steps.clear()
    stage._device = "cuda"
    stage.run(StepContext(1, num_chunks=2), {block: prompts[block] for block in (0, 1, 2)})  # a set's half is asked for
    decoder_steps.clear()
    found = stage.run(StepContext(0), prompts)
    assert len(decoder_steps) < alone
    for block in BLOCKS:
        same(found.blocks[block], expected.blocks[block], tolerance=1e-5)


def test_an_attempt_made_again_starts_anew():
    config = tiny_math()
    prompts, stage = prompts_of(config), stage_of(config)
    expected = stage_of(config).run(StepContext(0), prompts)
    stage.run(StepContext(0), {0: prompts[0]})  # the rest of the set never came
    for step_context in (StepContext(0, attempt=1), StepContext(0, attempt=2)):
        found = stage.run(step_context, prompts)
        for block in BLOCKS:
            same(found.blocks[block], expected.blocks[block])


# ------------------------------------------------------------------------------------------------------------ pipelines
@pytest.fixture
def events(monkeypatch) -> list[tuple[str, int]]:
    """What the learner's worker does to which block, in the order of the calls that it gets."""
    seen: list[tuple[str, int]] = []
    run, passes, step = RewardStage.run, Objective.passes, FlatOptimizer.step

    def rewarded(self, step_context, inputs):
        seen.extend(("reward", block) for block in inputs)
        return run(self, step_context, inputs)

    def learned(self, block, rows, index, device):
        seen.append(("gradient", block))
        return passes(self, block, rows, index, device)

    def stepped(*arguments):
        seen.append(("step", -1))
        return step(*arguments)

    monkeypatch.setattr(RewardStage, "run", rewarded)
    monkeypatch.setattr(Objective, "passes", learned)
    monkeypatch.setattr(FlatOptimizer, "step", stepped)
    return seen


EVERY_GROUP = "algorithm.drop_zero_variance_groups=false"


def test_a_blocks_gradient_is_computed_before_the_next_block_arrives(events):
    config = tiny_math("plan=pipelined", EVERY_GROUP)
    executor = executor_for(config, config.plan.variants, 2, SerialSession())
    iterate(config, executor, 1)
    assert events == [(what, block) for block in BLOCKS for what in ("reward", "gradient")] + [("step", -1)]


@pytest.mark.parametrize(("overrides", "epochs"), [([], 1), (TWO_STEPS, 2)], ids=["one step", "several steps"])
def test_every_epoch_reads_all_that_was_sampled_once(monkeypatch, overrides, epochs):
    """Groups that are all right or all wrong are left out of the loss, not of the metrics."""
    seen: dict[int, list[int]] = {block: [] for block in BLOCKS}
    watched, passes = [], Objective.passes

    def learned(self, block, rows, index, device):
        assert len(rows) == 8, "the completions of a block"
        watched.append(len(rows) - rows.num_trained)
        seen[block] += index.tolist()
        return passes(self, block, rows, index, device)

    monkeypatch.setattr(Objective, "passes", learned)
    config = tiny_math(*overrides)
    iterate(config, executor_for(config, config.plan.variants, 1, SerialSession()), 1)
    assert max(watched) > 0
    assert {block: sorted(rows) for block, rows in seen.items()} == dict.fromkeys(BLOCKS, sorted([*range(8)] * epochs))


def test_boards_get_a_histogram_of_log_ratios_where_weights_move_within_an_iteration():
    def counted(workers: int, *overrides: str):
        config = tiny_math(*overrides)
        metrics = iterate(config, executor_for(config, config.plan.variants, workers, SerialSession()), 1)[0]
        return getattr(metrics.get("losses/log_ratio"), "counts", None)

    alone = counted(1, *TWO_STEPS)
    assert (alone > 0).sum() > 2, "most of the second epoch's ratios are not 1"
    assert alone.tolist() == counted(2, *TWO_STEPS).tolist()
    assert counted(1) is None
    assert counted(1, *TWO_STEPS, "run.tensorboard=false") is None


CORRECTED = ["algorithm.tis_cap=2.0", "algorithm.lr_end_fraction=1.0", "run.num_iterations=4"]


def test_log_probs_of_weights_that_are_not_trained_any_more_are_not_computed(monkeypatch) -> None:
    read, all_log_probs = [], generation_stage.all_log_probs
    monkeypatch.setattr(generation_stage, "all_log_probs", lambda *asked: read.append(asked) or all_log_probs(*asked))
    config = tiny_math(*TWO_STEPS, *CORRECTED)
    trees = [{**entry, "staleness": 1} for entry in config.plan.variants]
    metrics = iterate(config, executor_for(config, trees, 1, SerialSession()), 4)
    assert [row["rollout/staleness"] for row in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert len(read) == config.num_blocks  # of the first iteration alone
