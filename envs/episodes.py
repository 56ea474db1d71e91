"""Episodes on top of a simulator: action chunks, shaped rewards, freezing, partial resets, replay and videos."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from envs.simulator import Measurement, RowTask, Simulator, all_finite, short
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.interfaces.envs import (
    PROPRIO,
    ChunkResult,
    EnvSpec,
    EpisodeEnd,
    Observation,
    RunningEpisode,
    features_of,
)
from rlinf_embodied.randomness import normal, uniform, words

_PARAPHRASES = ("please {}", "your task: {}", "can you {} for me?", "robot, {} now")  # of an instruction


class EpisodeEnv:
    """N rows of a task as a `VectorEnv`; see rlinf_embodied.interfaces for the contract of every method."""

    def __init__(
        self,
        config: EnvConfig,
        simulator: Simulator,
        instruction: str | Callable[[], Sequence[RowTask]],
        render_final: bool,
    ) -> None:
        """Adds episodes to a simulator.

        Args:
            config: the section env.
            simulator: N rows.
            instruction: of all rows; or, if rows have different tasks, a function that returns each row's current task.
            render_final: whether final observations have images.
        """
        self._config, self.simulator, self._render_final = config, simulator, render_final
        rate, needed = simulator.control_hz, config.control_hz
        rule, action = f"{simulator.backend} takes {rate:g} steps per second", f"use env.control_hz={rate:g}"
        require(rate in (0.0, needed), "env.control_hz", needed, rule, action)
        n, device = simulator.num_rows, simulator.device
        self.row_tasks = instruction if callable(instruction) else lambda: [RowTask("", instruction)] * n
        self._no_actions = torch.zeros(n, simulator.action_dim, device=device)
        self._state = self._measured(self._no_actions)
        self._running = torch.zeros(n, dtype=torch.bool, device=device)
        self._steps = torch.zeros(n, dtype=torch.long, device=device)
        self._return = torch.zeros(n, device=device)
        self._last_reward = torch.zeros(n, device=device)
        self._critic_state: Tensor | None = None  # what `_privileged` returns; None: not computed since the last step
        self._row_index = torch.arange(n, device=device)
        self._solved_once = torch.zeros(n, dtype=torch.bool, device=device)
        self._steps_solved = torch.zeros(n, dtype=torch.long, device=device)  # consecutive, up to the current one
        self._history = torch.zeros(n, config.horizon, simulator.action_dim, device=device)
        # columns of `_privileged` by number of env steps, and by `_steps_solved`, in [-1, 1]
        steps, hold = torch.arange(config.horizon + 1, device=device), max(1, config.hold_steps)
        phase = (steps % config.executed) / config.executed * 2 - 1
        self._time_columns = torch.stack([steps / config.horizon * 2 - 1, phase], 1)
        self._hold_column = torch.arange(hold + 1, device=device)[:, None] / hold * 2 - 1
        self._seeds = [0] * n
        size = config.obs_size, config.obs_size
        cameras = {name: simulator.image_sizes.get(name, size) for name in config.cameras}
        self._images = {
            name: torch.zeros(n, *size, 3, dtype=torch.uint8, device=device) for name, size in cameras.items()
        }
        self._vectors = self._vectors_of(config, simulator)
        states = {name: vector.shape[1] for name, vector in self._split(self._state.proprio).items()}
        # minimum and maximum age, in env steps, of what the next observation shows
        perturb, oldest = config.perturb, config.history - 1
        self._ages = perturb.observation_delay, perturb.observation_delay + perturb.observation_jitter + oldest
        # state and images of the env steps before the current one, oldest first: [N, ages, ...]
        repeated = lambda now: now[:, None].repeat_interleave(self._ages[1], 1)  # noqa: E731
        self._past_proprio = repeated(self._state.proprio)
        self._past_images = {name: repeated(images) for name, images in self._images.items()}
        axes = ("instruction", "delay", "noise", "observation_delay", "observation_jitter")
        self.perturbs = (*axes, *simulator.perturbs)
        self._unseen = set(range(n))  # rows whose state changed since they were last rendered
        self._film_rows: tuple[int, ...] = ()
        self._film_size = 0
        self._frames: dict[int, list[Tensor]] = {}
        self.spec = EnvSpec(
            task=config.task,
            num_envs=n,
            chunk=config.chunk,
            horizon=config.horizon,
            action_dim=simulator.action_dim,
            features=features_of(cameras, states, self._privileged().shape[1], config.history),
            backend=simulator.backend,
            execute_steps=config.execute_steps,
            history=config.history,
            has_success=simulator.has_success,
            categorical=simulator.categorical,
        )

    # -------------------------------------------------------------------------------------------------------- protocol
    def reset(self, seeds: Sequence[int], rows: Sequence[int] | None = None) -> Observation:
        """Starts an episode in each of `rows` (default: all) from its own seed; see VectorEnv.

        Raises:
            SimulatorError: the number of seeds is not that of the rows, or a row does not exist or is given twice.
        """
        rows = list(range(self.spec.num_envs)) if rows is None else [int(row) for row in rows]
        if len(seeds) != len(rows):
            raise SimulatorError(f"reset got {len(seeds)} seeds for {len(rows)} rows: give one seed per row")
        if not rows or len(set(rows)) != len(rows) or not all(0 <= row < self.spec.num_envs for row in rows):
            raise SimulatorError(f"reset got rows {rows}: each must be one of 0..{self.spec.num_envs - 1}, and once")
        self._begin(rows, seeds)
        return self._observe()

    def step_chunk(
        self, actions: Tensor | Callable[[int], Tensor], next_seeds: Sequence[int] | None = None
    ) -> ChunkResult:
        """Runs a chunk's first E env steps; see VectorEnv."""
        if next_seeds is not None and len(next_seeds) != self.spec.num_envs:
            raise SimulatorError(
                f"next_seeds has {len(next_seeds)} entries for {self.spec.num_envs} rows: give one per row, or None"
            )
        whole = self._checked(actions, (self.spec.chunk,)) if isinstance(actions, Tensor) else None
        steps, last_images = [], dict[int, dict[str, Tensor]]()
        for k in range(self.spec.executed):
            valid, rows = self._running.clone(), self._running.nonzero()[:, 0].tolist()
            privileged = self._privileged()
            privileged = privileged if len(rows) == len(valid) else torch.where(valid[:, None], privileged, 0.0)
            action = self._checked(actions(k), ()) if whole is None else whole[:, k]
            steps.append({"valid": valid, "privileged": privileged, **self._step(action, valid, rows)})
            ended = (steps[-1]["terminated"] | steps[-1]["truncated"]).nonzero()[:, 0].tolist()
            if ended:
                self._running[ended] = False
            images = self._rendered(ended) if self._render_final and ended and self._images else {}
            images = {name: self._window(self._past_images[name], now, ended) for name, now in images.items()}
            last_images |= {row: {name: image[i] for name, image in images.items()} for i, row in enumerate(ended)}
        final = sorted(last_images)
        episodes = tuple(self._episode_end(row) for row in final)
        final_observation = self._observe_final({row: last_images[row] for row in final}) if final else None
        if final and next_seeds is not None:
            self._begin(final, [next_seeds[row] for row in final])
        if rest := self.spec.chunk - len(steps):  # sub-steps that are not executed
            steps += [{name: torch.zeros_like(column) for name, column in steps[0].items()}] * rest
        return ChunkResult(
            **{name: _stacked([step[name] for step in steps]) for name in steps[0]},
            final_rows=tuple(final),
            final_observation=final_observation,
            observation=self._observe(),
            episodes=episodes,
        )

    def running(self) -> list[RunningEpisode | None]:
        """Returns the running episode of each row, None for frozen rows."""
        return [
            RunningEpisode(self._seeds[row], self._history[row, :steps].cpu().clone()) if runs else None
            for row, (runs, steps) in enumerate(zip(self._running.tolist(), self._steps.tolist(), strict=True))
        ]

    def restore(self, episodes: Sequence[RunningEpisode | None]) -> Observation:
        """Brings every row to its episode's current step by reset and replay (None: frozen); bit-equal on CPU.

        Raises:
            SimulatorError: the number of entries is not that of the rows, an episode is already over, or it runs on a
                simulator whose episodes cannot be replayed.
        """
        if len(episodes) != self.spec.num_envs:
            raise SimulatorError(f"restore got {len(episodes)} entries for {self.spec.num_envs} rows: give one per row")
        rows = [row for row, episode in enumerate(episodes) if episode is not None]
        lengths = torch.tensor([0 if e is None else len(e.actions) for e in episodes], device=self._steps.device)
        longest = int(lengths.max())
        if longest >= self.spec.horizon:
            raise SimulatorError(
                f"restore got an episode of {longest} actions, but episodes end after {self.spec.horizon}: "
                "restore running episodes only"
            )
        if rows and not self.history_free:
            raise SimulatorError(
                f"restore got {len(rows)} running episodes, but on {self.spec.backend} an episode is not known "
                "to be a function of seed and actions: use env.carry_over=false, or an env that can be replayed "
                "(ManiSkill: env.options.backend=batched; Gymnasium, if it is true of the env: "
                "env.options.history_free=true)"
            )
        self._running[:] = False
        if rows:
            self._begin(rows, [episodes[row].seed for row in rows])
        replay = torch.zeros_like(self._history)
        for row in rows:
            replay[row, : len(episodes[row].actions)] = episodes[row].actions.to(replay.device)
        for k in range(longest):
            mask = lengths > k
            self._step(replay[:, k], mask, mask.nonzero()[:, 0].tolist())
        return self._observe()

    def expert_actions(self) -> Tensor:
        """Returns the scripted expert's next single action for every row [N, A]; see VectorEnv."""
        if self.simulator.expert is None:
            raise SimulatorError(
                f"env.task={self.spec.task} with env.options={self._config.options} has no scripted expert: use "
                "warm_start.demonstrations, warm_start.checkpoint or warm_start.from_scratch=true "
                "(docs/warm_start.md), or a task, control mode and robot of envs/tasks.py"
            )
        return self.simulator.expert()

    @property
    def history_free(self) -> bool:
        """Whether an episode is a function of its seed and its actions."""
        return self.simulator.history_free

    @property
    def solved(self) -> Tensor:
        """Whether the task is solved now, bool [N]."""
        return self._state.success

    def state(self) -> Observation:
        """Returns the current observation of all rows, without images; see VectorEnv."""
        state = self._split(self._window(self._past_proprio, self._state.proprio).clone())
        return Observation(state, self._instructions(range(self.spec.num_envs)), privileged=self._privileged())

    def object_positions(self) -> Tensor | None:
        """Returns the position of the task's first movable object [N, 3], None where it has none; see VectorEnv."""
        return self.simulator.object_positions()

    def record(self, rows: Sequence[int], size: int = 256) -> None:
        """Records one image per env step of each of these rows from now on (original meshes, goal visible)."""
        self._film_rows, self._film_size = tuple(rows), size

    def take_frames(self) -> dict[int, list[Tensor]]:
        """Returns the images recorded since the last call, by row."""
        frames, self._frames = self._frames, {}
        return frames

    def close(self) -> None:
        self.simulator.close()

    # ----------------------------------------------------------------------------------------------------------- steps
    def _begin(self, rows: list[int], seeds: Sequence[int]) -> None:
        """Resets rows and the statistics of their episodes."""
        self.simulator.reset(rows, seeds)
        for step in range(self._config.perturb.initial_steps):
            drawn = (
                uniform(self._config.perturb.seed, "perturb start", seeds, step, shape=(self.spec.action_dim,)) * 2 - 1
            )
            actions = self._no_actions.clone()
            actions[rows] = torch.from_numpy(drawn).to(actions)
            self.simulator.step(actions, rows)
        self._state, self._critic_state = self._measured(self._no_actions), None
        index = torch.as_tensor(rows, device=self._running.device)
        self._running[index] = True
        self._steps[index] = 0
        self._return[index] = 0.0
        self._solved_once[index] = False
        self._steps_solved[index] = 0
        self._last_reward[index] = self._state.reward[index]
        self._past_proprio[index] = self._state.proprio[index][:, None]
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = int(seed)
        self._unseen.update(rows)

    def _step(self, actions: Tensor, mask: Tensor, rows: list[int]) -> dict[str, Tensor]:
        """Runs one env step of the rows in `mask` [N], whose numbers are `rows`, and updates the episodes' statistics.

        Returns the columns of a ChunkResult, each [N]; entries of other rows are zero / False.
        """
        nothing = torch.zeros_like(mask)
        if not rows:
            rewards = torch.zeros_like(self._return)
            return {"rewards": rewards, "terminated": nothing, "truncated": nothing, "success": nothing}
        all_step = len(rows) == len(mask)
        of_rows = (lambda new, old: new) if all_step else (lambda new, old: torch.where(mask, new, old))
        if all_step:
            self._history[self._row_index, self._steps] = actions
        else:
            actions = torch.where(mask[:, None], actions, 0.0)
            self._history[mask, self._steps[mask]] = actions[mask]
        if self._ages[1]:
            if self._render_final or self._observed_later(int(self._steps[rows[0]])):
                self._render()
            self._past_proprio[mask] = _shift(self._past_proprio, self._state.proprio)[mask]
            for name, past in self._past_images.items():
                past[mask] = _shift(past, self._images[name])[mask]
        actions = self._executed(actions, mask)
        self.simulator.step(actions, rows)
        self._unseen.update(rows)
        self._state, self._critic_state = self._measured(actions), None
        state = self._state
        success = state.success & mask
        self._steps += mask
        self._steps_solved = of_rows((self._steps_solved + 1) * success, self._steps_solved)
        self._return += of_rows(state.reward, 0.0)
        self._solved_once |= success
        fails = nothing if state.fail is None else state.fail & mask
        hold = self._config.hold_steps
        terminated = fails | (mask & (self._steps_solved >= hold)) if hold else nothing
        terminated = terminated if state.terminated is None else terminated | (state.terminated & mask)
        late = self._steps >= self.spec.horizon
        truncated = mask & (late if state.truncated is None else late | state.truncated) & ~terminated
        paid = terminated | truncated if self._config.bonus_at_timeout else terminated
        reward = of_rows(self._shaped_reward(state, paid & success), 0.0)
        self._last_reward = of_rows(state.reward.clone(), self._last_reward)
        if filmed := [row for row in self._film_rows if row in rows]:
            for row, image in self.simulator.film(filmed, self._film_size).items():
                self._frames.setdefault(row, []).append(image)
        return {"rewards": reward, "terminated": terminated, "truncated": truncated, "success": success}

    def _executed(self, actions: Tensor, mask: Tensor) -> Tensor:
        """Returns the actions [N, A] that the simulator executes: delayed and with noise, by env.perturb."""
        perturb = self._config.perturb
        if perturb.delay:
            step = self._steps - perturb.delay
            actions = torch.where((step >= 0)[:, None], self._history[self._row_index, step.clamp(min=0)], 0.0)
        if perturb.noise:
            steps = self._steps.cpu().numpy()
            noise = normal(perturb.seed, "perturb noise", self._seeds, steps, shape=actions.shape[1:])
            actions = actions + perturb.noise * torch.from_numpy(noise).to(actions)
        return torch.where(mask[:, None], actions, 0.0) if perturb.delay or perturb.noise else actions

    def _measured(self, actions: Tensor) -> Measurement:
        return self.simulator.measure(actions).checked(self.simulator.num_rows, self.simulator)

    def _shaped_reward(self, state: Measurement, ends_solved: Tensor) -> Tensor:
        """Returns the rewards for training [N]; `_last_reward` is still the reward before this step."""
        bonus = self._config.success_bonus * ends_solved
        if self._config.reward is Reward.sparse:
            return bonus
        if self._config.reward is Reward.dense:
            return state.reward + bonus
        return state.reward - self._last_reward + bonus

    def _episode_end(self, row: int) -> EpisodeEnd:
        """Returns ManiSkill's metrics of a row's finished episode, whose last state must still be the current one."""
        length = int(self._steps[row])
        total = float(self._return[row])
        once, at_end = float(self._solved_once[row]), float(self._state.success[row])
        solved = {"success_once": once, "success_at_end": at_end} if self.spec.has_success else {}
        metrics = solved | {"return": total, "episode_len": float(length), "reward": total / length}
        task = self.row_tasks()[row]
        return EpisodeEnd(
            *(row, self._seeds[row], metrics, task.name),
            task_instruction="" if self._config.perturb.instruction else task.instruction,
        )

    # ---------------------------------------------------------------------------------------------------- observations
    def _vectors_of(self, config: EnvConfig, simulator: Simulator) -> dict[str, slice]:
        """Returns the columns of the proprioception that each state vector of env.states takes.

        Raises:
            ConfigError: the simulator does not have a state vector of env.states.
        """
        sizes = simulator.state_vectors or {PROPRIO: self._state.proprio.shape[1]}
        ends = list(itertools.accumulate(sizes.values()))
        places = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        for name in config.states or ():
            rule = f"the state vectors of {config.task} are {', '.join(places)}"
            require(name in places, "env.states", name, rule, "name some of these, or null for all")
        return {name: places[name] for name in (config.states or places)}

    def _instructions(self, rows: Sequence[int]) -> tuple[str, ...]:
        tasks = self.row_tasks()
        texts = [tasks[row].instruction for row in rows]
        if self._config.perturb.instruction:
            drawn = words(self._config.perturb.seed, "perturb words", [self._seeds[row] for row in rows])
            texts = [_PARAPHRASES[n].format(text) for n, text in zip(drawn % len(_PARAPHRASES), texts, strict=True)]
        return tuple(texts)

    def _privileged(self) -> Tensor:
        """Returns the critic's state [N, Q]: the task's, then the CLOCK_COLUMNS."""
        if self._critic_state is None:
            state = self._state.proprio if self._state.privileged is None else self._state.privileged
            hold = self._hold_column[self._steps_solved.clamp(max=len(self._hold_column) - 1)]
            self._critic_state = torch.cat([state, self._time_columns[self._steps], hold], 1)
        return self._critic_state

    def _observe(self) -> Observation:
        """Returns the observation of all rows; images of frozen rows are black."""
        if not self.spec.cameras:
            return self.state()
        self._render()
        for images in (*self._images.values(), *self._past_images.values()):
            images[~self._running] = 0
        self._unseen.update((~self._running).nonzero()[:, 0].tolist())
        images = {name: self._window(self._past_images[name], now).clone() for name, now in self._images.items()}
        return replace(self.state(), images=images)

    def _window(self, past: Tensor, now: Tensor, rows: list[int] | None = None) -> Tensor:
        """Returns the env steps that an observation shows: the last env.history, delayed by env.perturb.

        Args:
            past: values of earlier env steps [N, ages, ...], oldest first.
            now: values of the current env step [R, ...].
            rows: the R rows of `now`; None: all N.

        Returns:
            [R, history, ...], oldest first; [R, ...] if env.history is 1.
        """
        if not past.shape[1]:
            return now
        perturb, selected = self._config.perturb, slice(None) if rows is None else rows
        delay = torch.full_like(self._steps, perturb.observation_delay)
        if perturb.observation_jitter:
            drawn = uniform(perturb.seed, "observation delay", self._seeds, self._steps.cpu().numpy())
            delay += torch.from_numpy(drawn * (perturb.observation_jitter + 1)).long().to(delay)
        last = past.shape[1] - delay[selected, None]
        steps = torch.cat([past[selected], now[:, None]], 1)
        index = last + torch.arange(1 - self._config.history, 1, device=last.device)
        window = steps[torch.arange(len(steps), device=last.device)[:, None], index]
        return window if self._config.history > 1 else window[:, 0]

    def _observed_later(self, step: int) -> bool:
        """Whether a later observation may show images of an env step; those of the first step always may be."""
        first, last = self._ages
        return step == 0 or any((step + age) % self._config.executed == 0 for age in range(first, last + 1))

    def _render(self) -> None:
        """Renders the running rows that changed; an episode's first images also fill its past env steps."""
        runs = self._running.tolist()
        rows = sorted(row for row in self._unseen if runs[row])
        for name, images in self._rendered(rows).items() if rows and self._images else ():
            self._images[name][rows] = images
            begun = [row for row in rows if self._steps[row] == 0]
            self._past_images[name][begun] = self._images[name][begun][:, None]
        self._unseen.difference_update(rows)

    def _observe_final(self, images: Mapping[int, Mapping[str, Tensor]]) -> Observation:
        """Returns the last observation of rows whose episodes ended; `images` are those of that env step, by row."""
        rows, images_of_rows = list(images), list(images.values())
        return Observation(
            state=self._split(self._window(self._past_proprio, self._state.proprio)[rows]),
            instruction=self._instructions(rows),
            images={name: torch.stack([of_row[name] for of_row in images_of_rows]) for name in images_of_rows[0]},
            privileged=self._privileged()[rows],
        )

    def _rendered(self, rows: list[int]) -> dict[str, Tensor]:
        """Returns the images of these rows by camera.

        Raises:
            SimulatorError: a camera's images are missing, or differ from the env's features in dtype or shape.
        """
        rendered = self.simulator.images(rows)
        for name, buffer in self._images.items():
            images, expected = rendered.get(name), (len(rows), *buffer.shape[1:])
            if images is None or images.dtype != torch.uint8 or tuple(images.shape) != expected:
                actual = "nothing" if images is None else f"{images.dtype} {list(images.shape)}"
                raise SimulatorError(
                    f"{type(self.simulator).__name__}.images returned {actual} for camera {name}, but uint8 "
                    f"{list(expected)} is needed: return an entry for each camera of env.cameras, with env.obs_size "
                    "pixels or the size in image_sizes"
                )
        return {name: rendered[name] for name in self._images}

    def _split(self, proprio: Tensor) -> dict[str, Tensor]:
        return {name: proprio[..., place] for name, place in self._vectors.items()}

    # ---------------------------------------------------------------------------------------------------------- checks
    def _checked(self, actions: Tensor, chunk: tuple[int, ...]) -> Tensor:
        """Returns actions [N, *chunk, A] as float32 on the simulator's device.

        Raises:
            SimulatorError: their shape is wrong, or those of a running row are not finite.
        """
        expected = (self.spec.num_envs, *chunk, self.spec.action_dim)
        if tuple(actions.shape) != expected:
            raise SimulatorError(
                f"actions have shape {tuple(actions.shape)}, but {expected} (rows, chunk, dimensions) are needed: "
                "nothing was stepped, rows " + short(range(self.spec.num_envs)) + " wait"
            )
        actions = actions.to(self._running.device, torch.float32)
        if not all_finite(actions) and (bad := ~actions.isfinite().flatten(1).all(1) & self._running).any():
            raise SimulatorError(
                f"actions of rows {short(bad.nonzero()[:, 0].tolist())} are not finite: nothing was stepped; check the "
                "policy's outputs for NaN"
            )
        return actions


def _stacked(columns: Sequence[Tensor]) -> Tensor:
    return columns[0].unsqueeze(1) if len(columns) == 1 else torch.stack(list(columns), 1)


def _shift(past: Tensor, now: Tensor) -> Tensor:
    """Drops the oldest of the past env steps [N, ages, ...] and appends the current one [N, ...]."""
    return torch.cat([past[:, 1:], now[:, None]], 1)
