"""Demonstrations and cloning as a stage: an expert, a teacher or a file shows how, and the policy learns it.

    collect (rounds) --> fit the whole policy (epochs) --> cache features --> fit all but the stem (epochs) --> save

Demonstrations are divided into a fixed number of data blocks, so that the clone is the same for every number of
workers.  They lie in the CPU's memory; cloning.py learns from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig, PolicyConfig, WarmStartConfig
from rlinf_embodied.embodied.cloning import Cloning, Phase
from rlinf_embodied.embodied.demonstrations import Demonstrations, join, join_all
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_check import check_policy, is_own, new_policy
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.embodied.recorded import Recorded, open_recorded
from rlinf_embodied.embodied.teacher import Teacher
from rlinf_embodied.embodied.warm_start_source import Kind, Source
from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.interfaces.envs import Observation, VectorEnv
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.randomness import normal, reset_seed
from rlinf_embodied.runtime.host import StageContext, StepContext
from rlinf_embodied.telemetry.progress import report_progress

NUM_DATA_BLOCKS = 4
ROWS = 16  # env rows per worker while demonstrating
_MOST_STARTS = 200  # draws of an initial state until the object lies in warm_start.region


@dataclass(frozen=True, slots=True)
class WarmStartStageConfig:
    """What the stage needs to know; with several envs, demonstrations are divided among them."""

    envs: tuple[EnvConfig, ...]
    policy: PolicyConfig
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    seed: int = 0
    source: Source | None = None  # of the demonstrations; None: the scripted expert

    def demonstrations(self, block: int) -> range:
        """Returns the numbers of a data block's demonstrations: blocks are as equal as possible."""
        given = None if self.source is None else self.source.num_episodes
        number = self.warm_start.num_demos if given is None else given
        return range(number * block // NUM_DATA_BLOCKS, number * (block + 1) // NUM_DATA_BLOCKS)


class WarmStartStage:
    """Collects demonstrations and clones them; one call per round or epoch, so that a progress bar can move."""

    def __init__(self, config: WarmStartStageConfig) -> None:
        self._config = config
        self._data: dict[int, list[Demonstrations]] = {}

    def setup(self, context: StageContext) -> int:
        """Builds the simulators and a new policy; returns how many rounds of demonstrations this worker needs."""
        config = self._config
        self._device = context.device
        self._reducer = Reducer(context.group, context.owners)
        source = config.source
        files = source is not None and source.kind is not Kind.teacher
        self._recorded: Recorded | None = open_recorded(source) if source and files else None
        rows = (self._recorded.num_rows if self._recorded else None) or ROWS
        self._envs = [make_env(for_demonstrations(env), rows, context.device) for env in config.envs]
        self._teacher = Teacher(source.path, self._envs[0], context.device) if source and not files else None
        env = self._envs[0]
        self._policy = cast(ImitationPolicy, new_policy(config.policy, env.spec, config.seed, context.device))
        if is_own(config.policy):
            seen = env.reset(range(rows)).to(context.device)
            check_policy(self._policy, config.policy, env.spec, seen)
        self._blocks = context.blocks
        self._todo = [(e, block, number) for block in context.blocks for e, number in self._episodes(block)]
        self._attempts = self._successes = 0
        of_env = [sum(item[0] == e for item in self._todo) for e in range(len(config.envs))]
        return sum(-(-number // ROWS) for number in of_env)

    def _episodes(self, block: int) -> Iterator[tuple[int, int]]:
        """Yields (env index, episode number) of a data block; env by env, so that a round has one env."""
        for e in range(len(self._envs)):
            numbers = self._config.demonstrations(block)
            yield from ((e, number) for number in numbers if number % len(self._envs) == e)

    # ------------------------------------------------------------------------------------------------ demonstrations
    def collect(self, step_context: StepContext) -> dict[str, int]:
        """Runs one round of demonstrations: up to ROWS episodes of one env."""
        if not self._todo:
            return {"episodes": 0, "chunks": 0, "solved": 0}
        e = self._todo[0][0]
        batch = [item for item in self._todo if item[0] == e][:ROWS]
        self._todo = [item for item in self._todo if item not in batch]
        chunks = solved = 0
        for (_, block, _), demonstration in zip(batch, self._demonstrate(self._envs[e], batch), strict=True):
            self._attempts += 1
            if demonstration is not None:
                solved += 1
                self._successes += 1
                chunks += len(demonstration)
                self._data.setdefault(block, []).append(demonstration)
        return {"episodes": len(batch), "chunks": chunks, "solved": solved}

    def _demonstrate(self, env: VectorEnv, batch: Sequence[tuple[int, int, int]]) -> list[Demonstrations | None]:
        """Runs one episode per row; an episode is kept up to the chunk in which it succeeds, or dropped if it fails."""
        numbers = [number for _, _, number in batch]
        if self._recorded is not None:
            return self._recorded.demonstrate(env, numbers)
        rows = list(range(len(batch)))
        observation = self._reset(env, numbers)
        seen: list[list[tuple[Observation, Tensor, Tensor | None]]] = [[] for _ in rows]
        solved = torch.zeros(len(rows), dtype=torch.bool)
        for chunk_step in range(env.spec.chunks_per_episode):
            positions = env.object_positions()
            labels: list[Tensor] = []
            before = observation if len(self._envs) == 1 else replace(observation, privileged=None)  # differs by task
            result = env.step_chunk(self._noisy_expert(env, numbers, chunk_step, labels))
            report_progress()
            observation = result.observation
            actions = torch.stack(labels, 1)
            for row in rows:
                if not solved[row]:
                    where = None if positions is None else positions[row].cpu()
                    seen[row].append((before.rows([row]).to("cpu"), actions[row].cpu(), where))
            solved |= result.success[: len(rows)].any(1).cpu()
            if solved.all():
                break
        return [join(parts) if solved[row] else None for row, parts in enumerate(seen)]

    def _reset(self, env: VectorEnv, numbers: Sequence[int]) -> Observation:
        """Starts an episode per row; where a region is given, restarts it until the object lies in it.

        Raises:
            SimulatorError: the object hardly ever lies there.
        """
        rows, seed = list(range(len(numbers))), self._config.seed
        observation = env.reset([int(reset_seed(seed, -1, number)) for number in numbers], rows)
        region = self._config.warm_start.region
        for attempt in range(1, _MOST_STARTS):
            places = env.object_positions()
            if region is None or places is None:
                return observation
            x, y = places[rows, 0], places[rows, 1]
            inside = (x >= region[0]) & (x <= region[1]) & (y >= region[2]) & (y <= region[3])
            again = (~inside).nonzero()[:, 0].tolist()
            if not again:
                return observation
            observation = env.reset([int(reset_seed(seed, -1, numbers[row], attempt)) for row in again], again)
        raise SimulatorError(
            f"warm_start.region is {region}, but the object of {env.spec.task} did not start there in {_MOST_STARTS} "
            "draws: use a larger region, in metres"
        )

    def _noisy_expert(
        self, env: VectorEnv, numbers: Sequence[int], chunk_step: int, labels: list[Tensor]
    ) -> Callable[[int], Tensor]:
        """Returns a controller that executes the expert's action plus noise, and files the clean one as the label."""
        chunk = env.spec.chunk

        def act(substep: int) -> Tensor:
            clean = (env.expert_actions() if self._teacher is None else self._teacher.actions(env)).clamp(-1.0, 1.0)
            labels.append(clean)
            step = chunk_step * chunk + substep
            noise = torch.zeros_like(clean)
            moved = min(3, clean.shape[1])  # where the hand goes is disturbed, not how it turns or grips
            drawn = normal(self._config.seed, "demonstration", list(numbers), step, shape=(moved,))
            noise[: len(numbers), :moved] = torch.from_numpy(drawn).to(noise) * self._noise_levels(numbers, step, noise)
            return (clean + noise).clamp(-1.0, 1.0)

        return act

    def _noise_levels(self, numbers: Sequence[int], step: int, like: Tensor) -> Tensor:
        """Noise level of each episode [n, 1]; the largest level only disturbs the beginning."""
        levels = self._config.warm_start.noise
        chosen = [levels[number % len(levels)] for number in numbers]
        late = step >= self._config.warm_start.noise_steps
        values = [0.0 if late and len(levels) > 1 and level == max(levels) else level for level in chosen]
        return torch.tensor(values).to(like)[:, None]

    # -------------------------------------------------------------------------------------------------------- cloning
    def prepare(self, step_context: StepContext) -> dict[str, int]:
        """Joins the demonstrations, closes the simulators and sets what the policy standardises its inputs with.

        Raises:
            SimulatorError: nothing was solved in one of the data blocks.
        """
        for env in self._envs:
            env.close()
        counts = self._reducer.gather_blocks(
            {b: torch.tensor([float(sum(len(d) for d in self._data.get(b, [])))]) for b in self._blocks}
        )
        self._sizes = {block: int(count[0]) for block, count in counts.items()}
        if min(self._sizes.values()) == 0:
            raise SimulatorError(self._nothing_solved())
        self._blocks_data = {block: join_all(self._data.pop(block)) for block in self._blocks}
        self._cloning = Cloning(self._policy, self._config.seed, self._reducer, self._device)
        self._cloning.take(self._blocks_data, self._sizes)
        self._cloning.measure()
        return {"attempts": self._attempts, "successes": self._successes, "chunks": sum(self._sizes.values())}

    def _nothing_solved(self) -> str:
        source, task = self._config.source, self._envs[0].spec.task
        if source is None:
            return (
                f"the expert of {task} solved none of a block's episodes: check the task's expert, or give "
                "warm_start.checkpoint"
            )
        if source.kind is Kind.teacher:
            return (
                f"warm_start.teacher is {source.path!r}, but it solved none of a block's episodes of {task}: train it "
                "for longer, and look at its own evaluation"
            )
        return (
            f"warm_start.demonstrations is {source.path!r}, but none of a block's episodes solves {task} when it is "
            "replayed: check env.robot, env.horizon and the simulator (physx_cpu or physx_cuda) against those it was "
            "recorded with"
        )

    def begin_phase(self, step_context: StepContext, whole: bool) -> int:
        """Starts cloning the whole policy, or all but its stem on cached features; returns minibatches per epoch."""
        config = self._config.warm_start
        head = Phase(config.head_epochs, config.head_batch_size, config.head_lr)
        return self._cloning.begin(whole, Phase(config.epochs, config.batch_size, config.lr) if whole else head)

    def fit(self, step_context: StepContext, epochs: tuple[int, int]) -> float:
        """Runs the epochs [first, last) of minibatches and returns the mean loss per chunk."""
        return self._cloning.fit(*epochs)

    def save(self, step_context: StepContext, folder: str) -> None:
        """Writes the clone (the first worker does)."""
        if 0 in self._blocks:
            save_policy(self._policy, Path(folder), self._config.envs[0], self._config.policy, self._device)


def for_demonstrations(env: EnvConfig) -> EnvConfig:
    """Returns the env section for whole episodes, one per row, whose chunks are executed to their end."""
    return replace(env, auto_reset=False, carry_over=False, hold_steps=0, execute_steps=0, chunks_per_rollout=0)
