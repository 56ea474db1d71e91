"""Episodes that run freely against episodes turn by turn, and partial rollouts against waiting for the longest.

python -m experiments.bench.episodes measure=free [seeds=3] [iterations=6] [slow=1]
python -m experiments.bench.episodes measure=partial [seeds=3] [iterations=8] [slow=1]

The engine is emulated (experiments.bench.emulated_engine.py) and the tool sleeps, so that a busy machine hardly
matters.  Everything else is real: the stages, the executor, the profile and the simulation that predicts a plan.

free      128 episodes of 16 prompts, with up to 8 turns of lognormal lengths, and a tool whose latency is lognormal
          with a mean of 0.3 s (99th percentile 1.9 s): seconds of an iteration and what the planner predicts from a
          profile, both ways.  Then Kolmogorov-Smirnov tests of lengths and rewards of different episodes.
partial   128 completions with long tails (90 tokens; 99th percentile 1,200): with half as many prompts again under way,
          against none
"""

from __future__ import annotations

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
from policies.causal_lm import CausalLM
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.command_line import main
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    measure: str = "free"
    seeds: int = 3
    iterations: int = 6
    slow: float = 1.0  # emulated times are so many times as long, and printed seconds divided by it: for a busy machine

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
    """What iterations of one way showed."""

    seconds: list[float]
    predicted_s: float
    lengths: list[int]
    rewards: list[float]

    def __str__(self) -> str:
        low, high, middle = min(self.seconds), max(self.seconds), mean(self.seconds)
        return f"{middle:.2f} s ({low:.2f}-{high:.2f}), predicted {self.predicted_s:.2f} ({self.error:+.0%})"

    @property
    def error(self) -> float:
        return self.predicted_s / mean(self.seconds) - 1


def config_of(folder: str, seed: int, words: Sequence[str]) -> MathConfig:
    return compose_math([*_SETTINGS.split(), f"policy.folder={folder}", f"run.seed={seed}", *words])


def arm(folder: str, own: Options, seed: int, words: Sequence[str]) -> Arm:
    """Profiles episodes, generation and rewards, predicts an iteration of them, and runs some."""
    config, cluster, session = config_of(folder, seed, words), Cluster("a core", "cpu", 1, 1, 0), SerialSession()
    stages = ("episodes" if config.has_loop else "prompts", "generation", "reward")
    work = reasoning_graph(
        stages,
        config.num_blocks,
        items_per_block=config.rows_per_block,
        blocks_per_batch=config.blocks_per_batch,
        configs=dict.fromkeys(stages, StageConfig(config, folder)),
        turns=config.num_turns if config.has_loop else 1,
        receivers=(),
    )
    profile = measure(work, session, cluster, "episodes", {}, lambda *shown: None, budget_s=60.0 * own.slow)
    plan = collocated(work, 1)
    predicted_s = simulate(plan, Pricer(work, profile, cluster)).iteration_s / own.slow
    executor = Executor(work, plan, session, cluster)
    seconds, lengths, rewards = list[float](), list[int](), list[float]()
    for iteration in range(own.iterations):
        position = Position((100 + iteration) * config.rl.prompts_per_iteration)
        start = time.perf_counter()
        result = executor.run(StepContext(iteration, message=position))
        seconds.append((time.perf_counter() - start) / own.slow)
        reports = result.all_of(stages[0 if config.has_loop else 1], GenerationReport)
        lengths += [n for report in reports for n in report.lengths]
        rewards += [float(right) for group in in_order(result.all_of("reward", list)) for right in group.correct]
    session.close()
    return Arm(seconds, predicted_s, lengths, rewards)


def free(folder: str, own: Options) -> None:
    """Compares free running with turn by turn."""
    shared = [f"generation.engine={_HERE}.TurnsEngine", "generation.max_new_tokens=512", "tool.max_turns=8"]
    shared += [f"reward._target_={_HERE}.reward", f"tool._target_={_HERE}.tool", "tool.concurrency=128"]
    ways = {"turn by turn": (0, []), "free": (1000, ["episodes.free=true"])}
    found: dict[str, list[Arm]] = {way: [] for way in ways}
    for seed in range(own.seeds):
        for way, (offset, words) in ways.items():
            found[way].append(arm(folder, own, offset + seed, [*shared, *words]))
            print(f"seed {offset + seed}, {way}: {found[way][-1]}", flush=True)
    turns, freely = found.values()
    ratios = [mean(b.seconds) / mean(a.seconds) for a, b in zip(turns, freely, strict=True)]
    print(f"free / turn by turn: {mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    for name in ("lengths", "rewards"):
        a, b = ([value for one in arms for value in getattr(one, name)] for arms in (turns, freely))
        p = ks_2samp(a, b).pvalue  # pyright: ignore[reportAttributeAccessIssue]
        print(f"{name} of {len(a)} and {len(b)} episodes, KS test: p = {p:.2f}")


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


def partial(folder: str, own: Options) -> None:
    """Compares partial rollouts with waiting for the longest completion."""
    ratios = []
    for seed in range(own.seeds):
        whole, part = (mean(carried(folder, own, seed, share)) for share in (0.0, 0.5))
        ratios.append(part / whole)
    print(f"partial / synchronous: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


def run(own: Options) -> None:
    os.environ[_SLOW] = str(own.slow)
    with tempfile.TemporaryDirectory() as folder:
        CausalLM.from_config(SHAPE, None, 0).save(Path(folder))
        {"free": free, "partial": partial}[own.measure](folder, own)


if __name__ == "__main__":
    main(run, Options)
