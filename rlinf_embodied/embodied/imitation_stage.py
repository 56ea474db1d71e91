"""Supervised fine-tuning as a stage: episodes of files are shown once, then an iteration is an epoch of cloning.

    collect (rounds) --> prepare --> run (an epoch: learn) --> held_out --> save

Episodes lie in the data blocks of the warm start, in the order of the files; some of each block are held out, drawn by
(seed, block).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.config import CloningConfig, EnvConfig, PolicyConfig
from rlinf_embodied.embodied.cloning import Cloning, HeldOut, Phase
from rlinf_embodied.embodied.demonstrations import Demonstrations, join_all
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import load_policy, save_policy
from rlinf_embodied.embodied.recorded import Recorded, open_recorded
from rlinf_embodied.embodied.warm_start_source import Kind, Source
from rlinf_embodied.embodied.warm_start_stage import NUM_DATA_BLOCKS, ROWS, for_demonstrations
from rlinf_embodied.errors import DataError
from rlinf_embodied.interfaces.envs import VectorEnv
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.learner_stage import LearnerStage
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.learning.weights import StageState, kept
from rlinf_embodied.randomness import permutation
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

_OPTIMIZER = "cloning_optimizer"


@dataclass(frozen=True, slots=True)
class ImitationStageConfig:
    """What the stage needs to know."""

    env: EnvConfig
    policy: PolicyConfig
    sft: CloningConfig
    seed: int
    sources: tuple[Source, ...]
    folder: str  # of the policy that it starts from

    def episodes(self, block: int) -> list[tuple[int, int, bool]]:
        """Returns (source, its episode, whether it is held out) of a data block's episodes; one at least is not."""
        every = [(k, number) for k, source in enumerate(self.sources) for number in range(source.num_episodes or 0)]
        mine = every[len(every) * block // NUM_DATA_BLOCKS : len(every) * (block + 1) // NUM_DATA_BLOCKS]
        number = max(1, round(len(every) * self.sft.held_out)) if self.sft.held_out else 0
        wanted = number * (block + 1) // NUM_DATA_BLOCKS - number * block // NUM_DATA_BLOCKS
        order = permutation(self.seed, "held out", block, size=len(mine)).tolist()
        apart = set(order[: min(wanted, len(mine) - 1)])
        return [(*episode, k in apart) for k, episode in enumerate(mine)]


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What came of an epoch, over all workers."""

    loss: float  # per chunk, as it was while learning
    lr: float
    num_chunks: int


class ImitationStage(LearnerStage):
    """Learns from files; every worker holds the whole policy and some of the data blocks."""

    user = "sft"
    sends_frozen = True

    def __init__(self, config: ImitationStageConfig) -> None:
        self._config = config
        self._shown: dict[tuple[int, bool], list[Demonstrations]] = {}
        self._optimizer: dict[str, Tensor] = {}  # of a checkpoint or snapshot, for the phase that is to come
        self._learning: dict[str, Learner] = {}  # of the phase that is under way
        self._whole: bool | None = None  # the phase that is under way

    def setup(self, context: StageContext) -> None:
        """Loads the policy, or takes its worker's copy."""
        config = self._config
        shared = cast(
            SharedPolicy[ImitationPolicy],
            context.share("policy", lambda: load_policy(config.policy, config.folder, context.device)),
        )
        self.hold(shared, context.group.rank, context.device, self._learning)
        self._policy, self._blocks = shared.policy, context.blocks
        self._reducer = Reducer(context.group, context.owners)
        self._cloning = Cloning(self._policy, config.seed, self._reducer, context.device)

    # ------------------------------------------------------------------------------------------------ demonstrations
    def open_files(self, step_context: StepContext) -> int:
        """Builds the simulator and opens the files; returns how many rounds `collect` has to be called for.

        Raises:
            DataError: vectors of a file have other sizes than those of the env.
            ConfigError: the run's instruction is none of a dataset's tasks.
        """
        sources = self._config.sources
        self._recorded: list[Recorded] = [open_recorded(source) for source in sources]
        rows = ROWS if any(source.kind is Kind.maniskill for source in sources) else 1
        self._env: VectorEnv = make_env(for_demonstrations(self._config.env), rows, self.device)
        for recorded in self._recorded:
            recorded.require(self._env)
        episodes = [(k, n, b, out) for b in self._blocks for k, n, out in self._config.episodes(b)]
        of_source = [[e for e in episodes if e[0] == k] for k in range(len(sources))]
        self._rounds = [part[i : i + ROWS] for part in of_source for i in range(0, len(part), ROWS)]
        return len(self._rounds)

    def collect(self, step_context: StepContext) -> dict[str, int]:
        """Reads or replays one round of episodes; returns how many, and how many of them are used."""
        if step_context.iteration >= len(self._rounds):
            return {"episodes": 0, "used": 0}
        batch = self._rounds[step_context.iteration]
        shown = self._recorded[batch[0][0]].demonstrate(self._env, [number for _, number, _, _ in batch])
        for (_, _, block, out), part in zip(batch, shown, strict=True):
            if part is not None:
                self._shown.setdefault((block, out), []).append(self._of_images(part))
        return {"episodes": len(batch), "used": sum(part is not None for part in shown)}

    def _of_images(self, part: Demonstrations) -> Demonstrations:
        """Returns what all files can show: a dataset knows neither the simulator's state nor where objects are."""
        if all(source.kind is Kind.maniskill for source in self._config.sources):
            return part
        return replace(part, observation=replace(part.observation, privileged=None), object_positions=None)

    def prepare(self, step_context: StepContext) -> dict[str, int]:
        """Closes the simulator, and measures the data where the policy is new; returns numbers of chunks.

        Raises:
            DataError: a block is left without an episode to learn from.
        """
        self._env.close()
        learned = {block: self._shown.get((block, False), []) for block in self._blocks}
        counts = self._reducer.gather_blocks({b: torch.tensor([float(sum(map(len, d)))]) for b, d in learned.items()})
        sizes = {block: int(count[0]) for block, count in counts.items()}
        if min(sizes.values()) == 0:
            raise DataError(
                f"data is {', '.join(s.path for s in self._config.sources)}, but none of a block's episodes to learn "
                f"from solves {self._config.env.task} when it is replayed: check env.robot, env.horizon and the "
                "simulator (physx_cpu or physx_cuda) against those it was recorded with"
            )
        self._cloning.take({block: join_all(parts) for block, parts in learned.items()}, sizes)
        out = {block: self._shown.get((block, True)) for block in self._blocks}
        self._held_out = {block: join_all(parts) if parts else None for block, parts in out.items()}
        self._num_chunks = sum(sizes.values())
        self._require_held_out()
        if self._config.sft.checkpoint is None:
            self._cloning.measure()
        return {"chunks": self._num_chunks}

    def _require_held_out(self) -> None:
        counted = {b: torch.tensor([float(part is not None)]) for b, part in self._held_out.items()}
        asked = any(out for block in range(NUM_DATA_BLOCKS) for *_, out in self._config.episodes(block))
        if asked and not sum(float(count[0]) for count in self._reducer.gather_blocks(counted).values()):
            raise DataError(
                f"sft.held_out is {self._config.sft.held_out}, but none of the episodes that are held out solves "
                f"{self._config.env.task} when it is replayed: give more episodes, or use sft.held_out=0"
            )

    # -------------------------------------------------------------------------------------------------------- learning
    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the epoch `step_context.iteration`, counted over both phases."""
        epoch, _ = self._epoch(step_context.iteration)
        self._enter(step_context.iteration)
        loss = self._cloning.fit(epoch, epoch + 1)
        self.shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), EpochReport(loss, self._cloning.learner.lr, self._num_chunks))

    def _epoch(self, iteration: int) -> tuple[int, bool]:
        """Returns the number of an iteration's epoch within its phase, and whether that phase is the first one."""
        whole = iteration < self._config.sft.epochs
        return (iteration if whole else iteration - self._config.sft.epochs), whole

    def _enter(self, iteration: int) -> None:
        """Begins the phase of an iteration where it is not under way; a resumed one has the optimizer it had."""
        epoch, whole = self._epoch(iteration)
        if self._whole is whole:
            return
        sft = self._config.sft
        size, lr, epochs = (
            (sft.batch_size, sft.lr, sft.epochs) if whole else (sft.head_batch_size, sft.head_lr, sft.head_epochs)
        )
        first = epoch == 0 and sft.checkpoint is None  # later on pooling has learned, and its scale stays
        self._cloning.begin(whole, Phase(epochs, size, lr, sft.schedule, sft.warmup), measure=first)
        self._whole = whole
        self._learning[_OPTIMIZER] = self._cloning.learner
        if self._optimizer and epoch > 0:
            self._cloning.learner.import_state(self._optimizer)
        self._optimizer = {}

    def held_out(self, step_context: StepContext) -> HeldOut | None:
        """Returns how well the policy imitates the held-out episodes; None without held-out episodes."""
        return self._cloning.held_out(self._held_out)

    # ----------------------------------------------------------------------------------------------- weights and state
    def write_policy(self, folder: Path) -> None:
        save_policy(self.shared.policy, folder, self._config.env, self._config.policy, self.device)

    def load(self, step_context: StepContext, folder: str) -> None:
        """Reads the optimizer's state; the weights were loaded with the policy."""
        self._resume_from(load_tensors(Path(folder), _OPTIMIZER), step_context.iteration)

    def export_snapshot(self, step_context: StepContext) -> StageState | None:
        """Returns weights and moments (the first worker does)."""
        groups = self.export_training() or {_OPTIMIZER: self._optimizer}  # all take part
        # all weights: what is frozen in one phase has been trained in the other
        return StageState.of(self._policy.module, self.shared.version, groups, whole=True) if self.rank == 0 else None

    def import_snapshot(self, step_context: StepContext, parts: Sequence[StageState | None]) -> None:
        """Restores weights and moments, with the phase that they are of."""
        state = kept(parts)
        self._resume_from(state.install(self._policy.module).get(_OPTIMIZER, {}), state.weights.version)

    def _resume_from(self, optimizer: Mapping[str, Tensor], version: int) -> None:
        self._optimizer, self._whole, self.shared.version = dict(optimizer), None, version
        self._learning.clear()
