"""Episodes that run freely against episodes turn by turn, and partial rollouts against waiting for the longest.

python -m experiments.bench.episodes measure=free [cases=one_block,...] [ways=turn_by_turn,free,partial] [seeds=0-2]
    [iterations=8] [slow=1] [out=...]
python -m experiments.bench.episodes measure=partial [seeds=0-2] [iterations=8] [slow=1]

The engine is emulated (experiments.bench.emulated_engine.py) and the tool sleeps, so that a busy machine hardly
matters.  Everything else is real: the stages, the executor, the profile and the simulation that predicts a plan.

free      128 episodes of 16 prompts, with up to 8 turns of lognormal lengths, and a tool whose latency is lognormal
          with a mean of 0.3 s (99th percentile 1.9 s): seconds of an iteration and what the planner predicts from a
          profile of other problems, each way.  Then Kolmogorov-Smirnov tests of lengths and rewards of different
          episodes.  In a worker the episodes are one block or two blocks; with few slots 32 of them decode at once
partial   128 completions with long tails (90 tokens; 99th percentile 1,200): with half as many prompts again under way,
          against none
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import cast

import numpy as np
from scipy.stats import ks_2samp

from experiments.bench.emulated_engine import EmulatedEngine
from experiments.bench.harness import Benchmark, Run, names_of
from policies.causal_lm import CausalLM
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig
from rlinf_embodied.config.checks import require_one_of
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import measure
from rlinf_embodied.learning.weights import export_weights
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.randomness import normal, uniform
from rlinf_embodied.reasoning.batch import GenerationReport, in_order
from rlinf_embodied.reasoning.generation_stage import GenerationStage
from rlinf_embodied.reasoning.graph import reasoning_graph
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Position, PromptStage
from rlinf_embodied.reporting.seeds import seeds_of
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession

_HERE = __spec__.name if __spec__ else __name__  # also when it is run as a command
SHAPE = LanguagePolicyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, context_length=8192)
_MEAN_S, _SPREAD = 0.3, 1.0  # of the tool's latency
_SLOW = "EPISODES_SLOW"  # a variable: Options.slow, for what is imported by its dotted path
_FACTOR = float(os.environ.get(_SLOW, "1"))
_SETTINGS = """
    cluster=serial plan=collocated run.exact=false data.level=sum1-2-9 policy=folder
    algorithm.prompts_per_iteration=16 algorithm.group_size=8
    generation.rows_per_block=128 generation.rows_per_batch=128 generation.max_num_seqs=256"""
_TURNS = f"""
    generation.engine={_HERE}.TurnsEngine generation.max_new_tokens=512 tool.max_turns=8 tool.concurrency=128
    tool._target_={_HERE}.tool reward._target_={_HERE}.reward"""
_CASES = {"one_block": "", "few_slots": "generation.max_num_seqs=32", "two_blocks": "generation.rows_per_block=64"}
_WAYS = {"turn_by_turn": "", "free": "episodes.free=true", "partial": "episodes.free=true episodes.carried=0.5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    measure: str = "free"
    cases: str = "one_block,few_slots,two_blocks"
    ways: str = "turn_by_turn,free,partial"
    seeds: str = "0-2"
    iterations: int = 8
    slow: float = 1.0  # emulated times are so many times as long, and printed seconds divided by it: for a busy machine
    out: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "", "measure", "free", "partial")


# --------------------------------------------------------------------------------------------------- what is emulated
class TurnsEngine(EmulatedEngine):
    """A small model on a GPU: steps take longer with more rows, but not in proportion."""

    step_s, row_s, median, spread = 6e-3 * _FACTOR, 1e-4 * _FACTOR, 16.0, 0.8


class TailsEngine(EmulatedEngine):
    """Completions of which few are very long."""

    step_s, row_s, median, spread = 3e-3 * _FACTOR, 2e-5 * _FACTOR, 90.0, 1.1


def tool(text: str, problem: Problem) -> str | None:
    """Answers three turns of four, after a latency that follows from the turn."""
    key = (problem.id, zlib.crc32(text.encode()))
    time.sleep(_MEAN_S * _FACTOR * float(np.exp(_SPREAD * normal(0, "latency", *key) - _SPREAD**2 / 2)))
    return "1;" if float(uniform(0, "over", *key)) < 0.75 else None


def reward(completion: str, problem: Problem) -> float:
    """Returns what an episode earns: whether the digits of its last turn have an even sum."""
    return float(sum(int(c) for c in completion if c.isdigit()) % 2 == 0)


# ------------------------------------------------------------------------------------------------------------ measures
@dataclass(frozen=True, slots=True)
class Arm:
    """Iterations of one way and seed."""

    case: str
    way: str
    seed: int
    predicted_s: float
    seconds: list[float]
    lengths: list[int]
    rewards: list[float]


def shown(arms: Sequence[Arm]) -> str:
    """Returns the mean seconds, the prediction and its error, with the range of single iterations or seeds."""
    errors = [arm.predicted_s / mean(arm.seconds) - 1 for arm in arms]
    seconds, predicted_s = [second for arm in arms for second in arm.seconds], mean(arm.predicted_s for arm in arms)
    measured = f"{mean(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
    error = f"{predicted_s / mean(seconds) - 1:+.0%} ({min(errors):+.0%} to {max(errors):+.0%})"
    return f"{arms[0].case}, {arms[0].way}: {measured}, predicted {predicted_s:.2f}, error {error}"


def config_of(folder: str, seed: int, words: Sequence[str]) -> MathConfig:
    return compose_math([*_SETTINGS.split(), f"policy.folder={folder}", f"run.seed={seed}", *words])


def arm(folder: str, own: Options, case: str, way: str, seed: int) -> Arm:
    """Profiles episodes, generation and rewards, predicts an iteration of them, and runs some."""
    words = [*_TURNS.split(), *_CASES[case].split(), *_WAYS[way].split()]
    seed_of_way = seed + 1000 * [*_WAYS].index(way)
    config, cluster = config_of(folder, seed_of_way, words), Cluster("a core", "cpu", 1, 1, 0)
    session, stages = SerialSession(), ("episodes" if config.has_loop else "prompts", "generation", "reward")
    work = reasoning_graph(
        stages,
        config.num_blocks,
        items_per_block=config.rows_per_block,
        blocks_per_batch=config.blocks_per_batch,
        configs=dict.fromkeys(stages, StageConfig(config, folder)),
        turns=config.num_turns if config.has_loop else 1,
        receivers=(),
    )
    profile = measure(work, session, cluster, "episodes", {}, lambda *shown: None, budget_s=600.0 * own.slow)
    plan = collocated(work, 1)
    predicted_s = simulate(plan, Pricer(work, profile, cluster)).iteration_s / own.slow
    executor = Executor(work, plan, session, cluster)
    seconds, lengths, rewards = list[float](), list[int](), list[float]()
    for iteration in range(1 + own.iterations):
        position = Position((1000 + iteration) * config.rl.prompts_per_iteration)
        start = time.perf_counter()
        result = executor.run(StepContext(iteration, message=position))
        seconds.append((time.perf_counter() - start) / own.slow)
        reports = result.all_of(stages[0 if config.has_loop else 1], GenerationReport)
        lengths += [n for report in reports for n in report.lengths]
        rewards += [float(right) for group in in_order(result.all_of("reward", list)) for right in group.correct]
    session.close()
    return Arm(case, way, seed, predicted_s, seconds[1:], lengths, rewards)  # the first has no episodes carried over


def free(folder: str, run: Run[Options]) -> None:
    """Compares ways with each other and with their predictions."""
    own = run.options
    cells = list(itertools.product(names_of(own.cases), names_of(own.ways)))
    arms: dict[tuple[str, str], list[Arm]] = {cell: [] for cell in cells}
    for seed, (case, way) in itertools.product(seeds_of(own.seeds, "seeds"), cells):
        arms[case, way].append(arm(folder, own, case, way, seed))
        print(f"seed {seed}, {shown(arms[case, way][-1:])}", flush=True)
    for cell in cells:
        print(shown(arms[cell]))
    kept = ("case", "way", "seed", "predicted_s", "seconds")
    run.write({"arms": [{name: getattr(one, name) for name in kept} for cell in cells for one in arms[cell]]})
    pools = [[one for (_, way), of_way in arms.items() if way == name for one in of_way] for name in [*_WAYS][:2]]
    for name in ("lengths", "rewards") if all(pools) else ():
        a, b = ([value for one in pool for value in getattr(one, name)] for pool in pools)
        p = ks_2samp(a, b).pvalue  # pyright: ignore[reportAttributeAccessIssue]
        print(f"{name} of {len(a)} and {len(b)} episodes, turn by turn and free, KS test: p = {p:.2f}")


def carried(folder: str, own: Options, seed: int, share: float) -> list[float]:
    """Returns the seconds of iterations of generation after the first, whose weights change in between."""
    words = [f"generation.engine={_HERE}.TailsEngine", "generation.max_new_tokens=4096", "episodes.free=true"]
    words += [f"episodes.carried={share}", "algorithm.tokens_per_microbatch=8192"]
    made = StageConfig(config_of(folder, seed, words), folder)
    prompts, generation, policy = (
        PromptStage(made),
        GenerationStage(made),
        CausalLM.from_config(LanguagePolicyConfig(), Path(folder), 0),
    )
    seconds, reports = list[float](), list[GenerationReport]()
    prompts.setup(solo_context(range(1)))
    generation.setup(solo_context(range(1)))
    for iteration in range(own.iterations):
        at = StepContext(iteration, message=Position(iteration * made.config.rl.prompts_per_iteration))
        asked = prompts.run(at, {0: []}).blocks
        generation.install_weights(at, export_weights(policy.module, iteration))
        start = time.perf_counter()
        reports.append(cast(GenerationReport, generation.run(at, {b: [part] for b, part in asked.items()}).report))
        seconds.append((time.perf_counter() - start) / own.slow)
    lengths = [n for report in reports for n in report.lengths]
    stale = sum(report.stale for report in reports) / sum(lengths)
    shown = f"{mean(seconds[1:]):.2f} s, mean length {mean(lengths):.0f}, tokens of older weights {stale:.0%}"
    print(f"seed {seed}, carried {share}: {shown}", flush=True)
    return seconds[1:]


def partial(folder: str, run: Run[Options]) -> None:
    """Compares partial rollouts with waiting for the longest completion."""
    own, ratios = run.options, []
    for seed in seeds_of(own.seeds, "seeds"):
        whole, part = (mean(carried(folder, own, seed, share)) for share in (0.0, 0.5))
        ratios.append(part / whole)
    print(f"partial / synchronous: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


def run(asked: Run[Options]) -> None:
    os.environ[_SLOW] = str(asked.options.slow)
    with tempfile.TemporaryDirectory() as folder:
        CausalLM.from_config(SHAPE, None, 0).save(Path(folder))
        {"free": free, "partial": partial}[asked.options.measure](folder, asked)


if __name__ == "__main__":
    Benchmark("episodes", Options, run).main()
