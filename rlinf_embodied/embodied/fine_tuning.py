"""Learners with demonstrations, which their workers make once, and the graph of fine-tuning, a learner alone.

    open_sources --> collect (rounds) --> prepare --> run (an epoch)
    `demonstrate` (driver)                            workflow.py's `run_iteration`

Demonstrations lie in a fixed number of data blocks, in the order of their sources, so that weights are the same under
every plan; some of each block are held out, drawn by (seed, block).  Those of an expert or a replayed recording stay in
the CPU's memory of the worker that learns from them; images of a recorded dataset are decoded in every epoch, as far as
warm_start.cache_gb does not suffice for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlinf_embodied.algorithms.demonstrations import Chunks, Demonstrations, join
from rlinf_embodied.algorithms.imitation import FineTuning, SFTConfig, sizes
from rlinf_embodied.algorithms.on_policy import OnPolicy
from rlinf_embodied.config import TrainConfig, WarmStartConfig
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.embodied.demonstrations import ROWS, RecordedChunks, demonstrator, for_demonstrations, speed_of
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.graph import ACTOR
from rlinf_embodied.embodied.learner import LearnerConfig, PolicyLearner
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.embodied.sources import NUM_DATA_BLOCKS, DemonstrationSource, Kind
from rlinf_embodied.errors import DataError, SimulatorError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import VectorEnv
from rlinf_embodied.randomness import permutation
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import of_type
from rlinf_embodied.workflow.graph import StageSpec, Workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratedConfig(LearnerConfig):
    """What a learner with demonstrations needs to know."""

    sources: tuple[DemonstrationSource, ...]
    start: WarmStartConfig  # how an expert acts, and whether the policy is new
    num_blocks: int = NUM_DATA_BLOCKS
    held_out: float = 0.0  # share of the episodes that nothing is learned from

    def episodes(self, block: int) -> list[tuple[int, int, bool]]:
        """Returns (source, its episode, whether it is held out) of a data block's episodes; one at least is not."""
        every = [(k, number) for k, source in enumerate(self.sources) for number in range(source.num_episodes)]
        of, share = self.num_blocks, self.held_out
        mine = every[len(every) * block // of : len(every) * (block + 1) // of]
        number = max(1, round(len(every) * share)) if share else 0
        wanted = number * (block + 1) // of - number * block // of
        order = permutation(self.model.seed, "held out", block, size=len(mine)).tolist()
        apart = set(order[: max(0, min(wanted, len(mine) - 1))])
        return [(*episode, k in apart) for k, episode in enumerate(mine)]


def fine_tuning_stage(
    config: TrainConfig, sources: tuple[DemonstrationSource, ...], policy_folder: str
) -> DemonstratedConfig:
    """Returns what the stage needs to know; it starts from the policy in a folder."""
    assert isinstance(config.algorithm, SFTConfig)
    return DemonstratedConfig(
        PolicyStageConfig(config.policy, policy_folder, config.env, config.run.seed, exact=config.run.exact.holds),
        num_iterations=config.run.num_iterations,
        algorithm=config.algorithm,
        sources=sources,
        start=config.warm_start,
        held_out=config.algorithm.held_out,
    )


def fine_tuning_workflow(stage: DemonstratedConfig) -> Workflow:
    """Returns the graph of the one stage."""
    spec = StageSpec(ACTOR, f"{__name__}.FineTuningLearner", stage, collective=True)
    return Workflow("fine-tuning", NUM_DATA_BLOCKS, {ACTOR: spec})


def demonstrate(executor: Executor, sources: Sequence[DemonstrationSource], progress: ShowProgress) -> None:
    """Has new stages make their demonstrations, round by round."""
    total = sum(source.num_episodes for source in sources)
    done = used = 0
    for number in range(max(of_type(executor.call(ACTOR, "open_sources", StepContext(0)), int))):
        answers = of_type(executor.call(ACTOR, "collect", StepContext(number)), dict)
        done += sum(answer["episodes"] for answer in answers)
        used += sum(answer["used"] for answer in answers)
        progress("demonstrations", done, total, f"{used} solved")
    executor.call(ACTOR, "prepare", StepContext(0))


class DemonstratedLearner(PolicyLearner):
    """A learner whose workers make the demonstrations of their blocks."""

    _config: DemonstratedConfig

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._blocks = context.blocks
        self._found: dict[tuple[int, bool], dict[tuple[int, int], Demonstrations | RecordedChunks]] = {}

    def open_sources(self, step_context: StepContext) -> int:
        """Builds the simulator and opens the sources; returns how many rounds `collect` has to be called for."""
        config, kinds = self._config, {source.kind for source in self._config.sources}
        start = config.start
        env = for_demonstrations(config.model.env, min(start.speeds))
        cache = FrameCache(start.cache_gb * 1e9, start.decoders)
        alone = env if Kind.expert in kinds else replace(env, chunk=1)
        self._env: VectorEnv = make_env(alone, ROWS if kinds & {Kind.expert, Kind.maniskill} else 1, self.device)
        spec = replace(self._env.spec, chunk=config.model.env.chunk)
        settings = (self._env, spec, start, config.model.seed, cache)
        self._demonstrators = [demonstrator(source, *settings) for source in config.sources]
        # a round lasts as long as its longest episode, so that those of one speed share rounds
        episodes = [(k, n, b, out) for b in self._blocks for k, n, out in config.episodes(b)]
        episodes.sort(key=lambda episode: speed_of(start, episode[1]))
        of_source = [[e for e in episodes if e[0] == k] for k in range(len(config.sources))]
        self._rounds = [part[i : i + ROWS] for part in of_source for i in range(0, len(part), ROWS)]
        return len(self._rounds)

    def collect(self, step_context: StepContext) -> dict[str, int]:
        """Makes the demonstrations of one round; returns how many episodes it has, and how many of them are used."""
        if step_context.iteration >= len(self._rounds):
            return {"episodes": 0, "used": 0}
        batch = self._rounds[step_context.iteration]
        recorded = any(source.kind is Kind.recorded for source in self._config.sources)
        found = self._demonstrators[batch[0][0]]([number for _, number, _, _ in batch])
        for (source, number, block, out), part in zip(batch, found, strict=True):
            if part is None:
                continue
            part = replace(part, source=source)
            if recorded and isinstance(part, Demonstrations):  # others show neither of these
                part = replace(part, observation=replace(part.observation, privileged=None), object_positions=None)
            self._found.setdefault((block, out), {})[source, number] = part
        return {"episodes": len(batch), "used": sum(part is not None for part in found)}

    def _of_block(self, block: int, held_out: bool) -> list[Demonstrations | RecordedChunks]:
        """Returns a block's demonstrations in the order of their sources and numbers, and keeps none."""
        return [part for _, part in sorted(self._found.pop((block, held_out), {}).items())]

    def _collected(self, of_each: bool) -> dict[int, Chunks]:
        """Closes the simulator and returns the demonstrations of blocks that have some.

        Raises:
            SimulatorError: there are none, or with `of_each` none of a block.
        """
        self._env.close()
        blocks = {block: self._of_block(block, held_out=False) for block in self._blocks}
        found = sizes(self._made.training.reducer, blocks).values()
        if (min(found) if of_each else sum(found)) == 0:
            kinds = ", ".join(source.path or source.kind for source in self._config.sources)
            raise SimulatorError(
                f"none of a block's episodes from {kinds} solves {self._config.model.env.task} here: check a task's "
                "expert; compare env.options.robot, env.horizon and the simulator with those that a file was recorded "
                "with"
            )
        return {block: join(parts) for block, parts in blocks.items() if parts}


class CloningLearner(DemonstratedLearner):
    """Learns from rollouts and demonstrations (algorithms/cloning.py)."""

    _made: OnPolicy

    def prepare(self, step_context: StepContext) -> None:
        """Hands the demonstrations to the algorithm; raises a SimulatorError where there are none."""
        assert self._made.cloning is not None
        self._made.cloning.demonstrations = self._collected(of_each=False)


class FineTuningLearner(DemonstratedLearner):
    """Learns from demonstrations; every worker holds the whole policy and some of the data blocks."""

    sends_frozen = True  # what one phase freezes the other trains
    _made: FineTuning

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._made.fresh = self._config.start.checkpoint is None
        self._made.max_feature_bytes = self._config.start.cache_gb * 1e9
        self._made.weights = [source.weight for source in self._config.sources if source.weight is not None]

    def prepare(self, step_context: StepContext) -> None:
        """Measures the demonstrations where the policy is new.

        Raises:
            SimulatorError: a block is left without a demonstration to learn from.
            DataError: none is left that could be held out.
        """
        config, self._data = self._config, self._collected(of_each=True)
        out = {block: self._of_block(block, held_out=True) for block in self._blocks}
        self._held_out = {block: join(parts) if parts else None for block, parts in out.items()}
        wanted = any(apart for block in range(NUM_DATA_BLOCKS) for *_, apart in config.episodes(block))
        if wanted and not sum(sizes(self._made.training.reducer, out).values()):
            raise DataError(
                f"algorithm.held_out is {config.held_out}, but none of the episodes that are held out "
                f"solves {config.model.env.task} here: give more episodes, or use algorithm.held_out=0"
            )
        if self._made.fresh:
            self._made.measure(self._data)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the epoch `step_context.iteration`, counted over both phases, and imitates the held-out episodes."""
        metrics = self._made.update(step_context, self._data) | self._made.held_out(self._held_out)
        self.shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), metrics)
