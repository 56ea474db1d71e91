"""How demonstrations are made: an expert acts, a recording is replayed, recorded images are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.demonstrations import Chunks, Demonstrations
from rlinf_embodied.config import EnvConfig, PerturbConfig, PrefixSchedule, WarmStartConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.maniskill_h5 import RecordedEpisode, read_recording
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset
from rlinf_embodied.embodied.env_stage import Controller
from rlinf_embodied.embodied.sources import DemonstrationSource, Kind, require_actions
from rlinf_embodied.errors import DataError
from rlinf_embodied.interfaces.envs import EnvSpec, FeatureKind, Observation, VectorEnv
from rlinf_embodied.randomness import normal, reset_seed
from rlinf_embodied.telemetry.progress import report_progress

ROWS = 16  # env rows per worker while demonstrating


@dataclass(frozen=True, slots=True)
class RecordedChunks(Chunks):
    """The chunks that start at frames [M] of a recorded dataset; images are decoded when they are needed."""

    dataset: RecordedDataset
    frames: np.ndarray  # int64 [M]
    spec: EnvSpec  # what observations and chunks look like
    cache: FrameCache
    source: int = 0

    def __len__(self) -> int:
        return len(self.frames)

    @classmethod
    def concatenate(cls, parts: Sequence[RecordedChunks]) -> RecordedChunks:
        first, frames = parts[0], np.concatenate([part.frames for part in parts])
        return cls(first.dataset, frames, first.spec, first.cache, first.source)

    @property
    def proprio(self) -> Tensor:
        return torch.from_numpy(self.dataset.state[self._seen(self.frames)]).flatten(1)

    def _seen(self, frames: np.ndarray) -> np.ndarray:
        """Returns the frames that an observation shows, [M, env.history], oldest first; the first one is repeated."""
        return self.dataset.window(frames, range(1 - self.spec.history, 1))[0]

    def prefetch(self, index: Sequence[int] | Tensor) -> None:
        seen = self._seen(self.frames[np.asarray(index, np.int64)])
        for camera in self.spec.cameras:
            self.cache.request(self.dataset, camera, seen.reshape(-1))

    def rows(self, index: Sequence[int] | Tensor, images: bool = True) -> Demonstrations:
        frames = self.frames[np.asarray(index, np.int64)]
        seen = self._seen(frames)
        seen = seen if self.spec.history > 1 else seen[:, 0]
        parts = self.spec.of_kind(FeatureKind.state)
        vectors = torch.from_numpy(self.dataset.state[seen]).split([part.shape[-1] for part in parts], -1)
        pictures = {name: self.cache.get(self.dataset, name, seen) for name in self.spec.cameras if images}
        observation = Observation(
            state={part.name: vector for part, vector in zip(parts, vectors, strict=True)},
            instruction=tuple(self.dataset.task(int(frame)) for frame in frames),
            images={name: torch.from_numpy(shown) for name, shown in pictures.items()},
        )
        steps, is_pad = self.dataset.window(frames, range(self.spec.chunk))
        actions = torch.from_numpy(self.dataset.columns[ACTION][steps])
        return Demonstrations(observation, actions, None, torch.from_numpy(is_pad), self.source)


def for_demonstrations(env: EnvConfig, slowest: float = 1.0) -> EnvConfig:
    """Returns the env section for whole episodes, one per row; a chunk has the actions between two policy calls.

    Nothing is perturbed: RL is to cope with a world that demonstrations did not show.  The slower the slowest expert
    is, the longer may an episode be.
    """
    executed = env.executed
    horizon = env.horizon if slowest == 1 else math.ceil(env.horizon / slowest / executed) * executed
    env = replace(env, perturb=PerturbConfig(), rtc=PrefixSchedule.off, horizon=horizon, chunk=executed)
    return replace(env, auto_reset=False, carry_over=False, hold_steps=0, execute_steps=0, chunks_per_rollout=0)


def demonstrator(
    source: DemonstrationSource, env: VectorEnv, spec: EnvSpec, start: WarmStartConfig, seed: int, cache: FrameCache
) -> Callable[[Sequence[int]], Sequence[Demonstrations | RecordedChunks | None]]:
    """Returns what makes a source's demonstrations of numbered episodes, None of one that does not solve the task.

    Args:
        source: where they come from.
        env: `for_demonstrations`, of ROWS rows, or of one for a recorded dataset.  A chunk of the policy's starts where
            one of this env does: at every policy call of an expert's episode, and at every env step of a file's.
        spec: what the policy acts in.
        start: how an expert acts.
        seed: of the expert's episodes.
        cache: for images of recorded datasets.

    Raises:
        DataError: vectors of a file have other sizes than those of the env.
        ConfigError: the run's instruction is none of a dataset's tasks.
    """
    if source.kind is Kind.expert:
        return partial(_expert, env, spec.chunk, start, seed)
    if source.kind is Kind.maniskill:
        episodes = read_recording(Path(source.path), source.named).episodes
        _require_size(source, "actions", episodes[0].actions.shape[1], spec.action_dim, "env.options.robot")
        return partial(_replay, env, spec.chunk, episodes)
    dataset = source.open()
    settings = "env.options.control_mode, env.options.robot"
    _require_size(source, ACTION, dataset.size(ACTION), spec.action_dim, settings)
    state_dim = sum(part.shape[-1] for part in spec.of_kind(FeatureKind.state))
    _require_size(source, STATE, sum(dataset.states.values()), state_dim, "env.options.robot")
    instruction, tasks = env.state().instruction[0], dataset.tasks
    rule = f"a policy knows the words that it learned, and the tasks of {source.named}={source.path} are {tasks}"
    require(instruction in tasks, "env.instruction", instruction, rule, f"set env.instruction={tasks[0]!r}")

    def recorded(number: int) -> RecordedChunks:
        frames = dataset.frames(number)
        actions = dataset.columns[ACTION][frames.start : frames.stop]
        require_actions(source.where, f"episode {number}", actions, source.bounded)
        return RecordedChunks(dataset, np.array(frames), spec, cache)

    return lambda numbers: [recorded(number) for number in numbers]


def _require_size(source: DemonstrationSource, name: str, theirs: int | None, ours: int, settings: str) -> None:
    if theirs != ours:
        raise DataError(
            f"{source.where}, whose {name} have {theirs} dimensions, but those of the env have {ours}: set "
            f"{settings} as they were when it was recorded"
        )


def run_episodes(
    env: VectorEnv,
    observation: Observation,
    act: Callable[[int, Observation, list[Tensor]], Controller],
    number: int,
    lengths: Sequence[int] | None = None,
    hold: int = 1,
) -> list[tuple[bool, Demonstrations]]:
    """Runs one episode in each of the first rows until it has stayed solved for `hold` chunks, or for `lengths` chunks.

    The env is at the beginning of all episodes, where it shows `observation`.  `act` is given the number of the
    chunk-step, what all rows show, and a list; it returns a controller, which adds to that list the demonstrated action
    [N, A] of every sub-step.  Episodes of given lengths are solved if they are at any time, others if they end so.
    """
    seen: list[list[Demonstrations]] = [[] for _ in range(number)]
    held, solved = [0] * number, [False] * number
    for step in range(env.spec.chunks_per_episode):
        live = [row for row in range(number) if (held[row] < hold if lengths is None else step < lengths[row])]
        if not live:
            break
        positions = env.object_positions()
        labels: list[Tensor] = []
        result = env.step_chunk(act(step, observation, labels))
        report_progress()
        actions = torch.stack(labels, 1)
        for row in live:
            where = None if positions is None else positions[[row]].cpu()
            seen[row].append(Demonstrations(observation.rows([row]).to("cpu"), actions[[row]].cpu(), where))
            now = bool(result.success[row].any())
            held[row] = held[row] + 1 if now else 0
            solved[row] = now or (lengths is not None and solved[row])
        observation = result.observation
    return [(solved[row], Demonstrations.concatenate(parts)) for row, parts in enumerate(seen)]


def speed_of(start: WarmStartConfig, number: int) -> float:
    """Returns the speed of the expert in an episode: each speed meets each level of noise."""
    return start.speeds[number // len(start.noise) % len(start.speeds)]


def _expert(
    env: VectorEnv, chunk: int, start: WarmStartConfig, seed: int, numbers: Sequence[int]
) -> list[Demonstrations | None]:
    """The scripted expert at a speed: noisy actions are executed, clean ones are the labels."""
    levels, rows = len(start.noise), len(numbers)
    speeds = torch.tensor([speed_of(start, number) for number in numbers])[:, None]

    def controller(chunk_step: int, shown: Observation, labels: list[Tensor]) -> Callable[[int], Tensor]:
        def act(substep: int) -> Tensor:
            clean = env.expert_actions().clamp(-1.0, 1.0)
            moved = min(3, clean.shape[1])  # where the hand goes is limited and disturbed, not how it turns or grips
            limit = speeds.to(clean)
            clean[:rows, :moved] = clean[:rows, :moved].clamp(-limit, limit)
            labels.append(clean)
            step = chunk_step * env.spec.chunk + substep
            noise = torch.zeros_like(clean)
            drawn = normal(seed, "demonstration", list(numbers), step, shape=(moved,))
            chosen = [start.noise[number % levels] for number in numbers]
            if step >= start.noise_steps and levels > 1:  # the largest one disturbs beginnings
                chosen = [0.0 if level == max(start.noise) else level for level in chosen]
            noise[:rows, :moved] = torch.from_numpy(drawn).to(noise) * torch.tensor(chosen).to(noise)[:, None]
            return (clean + noise).clamp(-1.0, 1.0)

        return act

    seeds = [int(reset_seed(seed, -1, number)) for number in numbers]
    found = run_episodes(env, env.reset(seeds, list(range(rows))), controller, rows)
    executed = env.spec.chunk
    whole = lambda part: part if chunk == executed else _overlapping(part, len(part) * executed, chunk)  # noqa: E731
    return [whole(part) if solved else None for solved, part in found]


def _replay(
    env: VectorEnv, chunk: int, recording: Sequence[RecordedEpisode], numbers: Sequence[int]
) -> list[Demonstrations | None]:
    """Runs seeds and actions of a ManiSkill recording again, for the run's own cameras.

    An episode may be solved a little later than it was: its last action is repeated until the end of a chunk.
    """
    episodes = [recording[number] for number in numbers]
    observation = env.reset([episode.seed for episode in episodes], list(range(len(episodes))))
    lengths = [len(episode.actions) for episode in episodes]

    def act(step: int, shown: Observation, labels: list[Tensor]) -> Tensor:
        actions = torch.zeros(env.spec.num_envs, env.spec.action_dim)
        for row, episode in enumerate(episodes):  # of an episode that has ended, the last one
            actions[row] = torch.from_numpy(episode.actions[min(step, lengths[row] - 1)])
        labels.append(actions)
        return actions[:, None]

    found = run_episodes(env, observation, act, len(episodes), [-(-length // chunk) * chunk for length in lengths])
    parts = zip(found, lengths, strict=True)
    return [_overlapping(part, length, chunk) if solved else None for (solved, part), length in parts]


def _overlapping(parts: Demonstrations, length: int, chunk: int) -> Demonstrations:
    """Returns the first env steps of an episode as longer chunks that start where those of `parts` do."""
    actions, starts = parts.actions.flatten(0, 1), torch.arange(0, length, parts.actions.shape[1])
    wanted = starts[:, None] + torch.arange(chunk)
    part = parts.rows(range(len(starts)))
    return replace(part, actions=actions[wanted.clamp(max=length - 1)], is_pad=wanted >= length)
