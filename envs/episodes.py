"""Episodes over a simulator: chunks of steps, shaped rewards, freezing, partial resets, replay and films."""

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
        """`instruction` is a function that returns each row's task now where rows have several.

        `render_final`: whether final observations have images.
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
        self._shown: Tensor | None = None  # what `_privileged` returns of this moment, None: not asked for yet
        self._each = torch.arange(n, device=device)
        self._solved_once = torch.zeros(n, dtype=torch.bool, device=device)
        self._held = torch.zeros(n, dtype=torch.long, device=device)  # env steps on end that the task has been solved
        self._history = torch.zeros(n, config.horizon, simulator.action_dim, device=device)
        # what `_privileged` tells of a number of env steps, and of steps that the task has been solved, in [-1, 1]
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
        # how many env steps ago something may have been that the next observation shows: from, to
        how, oldest = config.perturb, config.history - 1
        self._ages = how.observation_delay, how.observation_delay + how.observation_jitter + oldest
        # what the env steps before the present one showed, the oldest first: [N, ages, ...]
        earlier = lambda now: now[:, None].repeat_interleave(self._ages[1], 1)  # noqa: E731
        self._past_proprio = earlier(self._state.proprio)
        self._past_images = {name: earlier(images) for name, images in self._images.items()}
        own = ("instruction", "delay", "noise", "observation_delay", "observation_jitter")
        self.perturbs = (*own, *simulator.perturbs)
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
            SimulatorError: the number of seeds differs from that of the rows, or a row does not exist or comes twice.
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
            known = self._privileged()
            known = known if len(rows) == len(valid) else torch.where(valid[:, None], known, 0.0)
            action = self._checked(actions(k), ()) if whole is None else whole[:, k]
            steps.append({"valid": valid, "privileged": known, **self._step(action, valid, rows)})
            ended = (steps[-1]["terminated"] | steps[-1]["truncated"]).nonzero()[:, 0].tolist()
            if ended:
                self._running[ended] = False
            images = self._rendered(ended) if self._render_final and ended and self._images else {}
            images = {name: self._visible(self._past_images[name], seen, ended) for name, seen in images.items()}
            last_images |= {row: {name: seen[i] for name, seen in images.items()} for i, row in enumerate(ended)}
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
        """Brings every row to the given point by reset and replay (None: frozen); bit-equal on CPU.

        Raises:
            SimulatorError: not one entry per row, an episode that is already over, or a running one on a simulator
                whose episodes cannot be replayed.
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
        if rows and not self.simulator.history_free:
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
    def solved(self) -> Tensor:
        """Whether the task is solved now, bool [N]."""
        return self._state.success

    def state(self) -> Observation:
        """Returns the current observation of all rows, without images; see VectorEnv."""
        state = self._split(self._visible(self._past_proprio, self._state.proprio).clone())
        return Observation(state, self._told(range(self.spec.num_envs)), privileged=self._privileged())

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
        self._state, self._shown = self._measured(self._no_actions), None
        index = torch.as_tensor(rows, device=self._running.device)
        self._running[index] = True
        self._steps[index] = 0
        self._return[index] = 0.0
        self._solved_once[index] = False
        self._held[index] = 0
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
        every = len(rows) == len(mask)
        of_rows = (lambda new, old: new) if every else (lambda new, old: torch.where(mask, new, old))
        if every:
            self._history[self._each, self._steps] = actions
        else:
            actions = torch.where(mask[:, None], actions, 0.0)
            self._history[mask, self._steps[mask]] = actions[mask]
        if self._ages[1]:
            if self._render_final or self._shown_later(int(self._steps[rows[0]])):
                self._render()
            self._past_proprio[mask] = _moved_on(self._past_proprio, self._state.proprio)[mask]
            for name, past in self._past_images.items():
                past[mask] = _moved_on(past, self._images[name])[mask]
        actions = self._executed(actions, mask)
        self.simulator.step(actions, rows)
        self._unseen.update(rows)
        self._state, self._shown = self._measured(actions), None
        state = self._state
        success = state.success & mask
        self._steps += mask
        self._held = of_rows((self._held + 1) * success, self._held)
        self._return += of_rows(state.reward, 0.0)
        self._solved_once |= success
        fails = nothing if state.fail is None else state.fail & mask
        terminated = fails | (mask & (self._held >= max(1, hold))) if (hold := self._config.hold_steps) else nothing
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
        """Returns what reaches the simulator [N, A] of the chosen actions: late and with noise, by env.perturb."""
        how = self._config.perturb
        if how.delay:
            since = self._steps - how.delay
            actions = torch.where((since >= 0)[:, None], self._history[self._each, since.clamp(min=0)], 0.0)
        if how.noise:
            drawn = normal(how.seed, "perturb noise", self._seeds, self._steps.cpu().numpy(), shape=actions.shape[1:])
            actions = actions + how.noise * torch.from_numpy(drawn).to(actions)
        return torch.where(mask[:, None], actions, 0.0) if how.delay or how.noise else actions

    def _measured(self, actions: Tensor) -> Measurement:
        return self.simulator.measure(actions).checked(self.simulator.num_rows, self.simulator)

    def _shaped_reward(self, state: Measurement, ends_solved: Tensor) -> Tensor:
        """Returns the rewards for training [N]; `_last_reward` is still that before this step."""
        bonus = self._config.success_bonus * ends_solved
        if self._config.reward is Reward.sparse:
            return bonus
        if self._config.reward is Reward.dense:
            return state.reward + bonus
        return state.reward - self._last_reward + bonus

    def _episode_end(self, row: int) -> EpisodeEnd:
        """Returns ManiSkill's metrics of a row's finished episode; its last state is still the current one."""
        length = int(self._steps[row])
        total = float(self._return[row])
        once, at_end = float(self._solved_once[row]), float(self._state.success[row])
        solved = {"success_once": once, "success_at_end": at_end} if self.spec.has_success else {}
        metrics = solved | {"return": total, "episode_len": float(length), "reward": total / length}
        return EpisodeEnd(row=row, seed=self._seeds[row], task=self.row_tasks()[row].name, metrics=metrics)

    # ---------------------------------------------------------------------------------------------------- observations
    def _vectors_of(self, config: EnvConfig, simulator: Simulator) -> dict[str, slice]:
        """Returns where in the proprioception each state vector is that env.states asks for.

        Raises:
            ConfigError: env.states names one that the simulator does not have.
        """
        sizes = simulator.state_vectors or {PROPRIO: self._state.proprio.shape[1]}
        ends = list(itertools.accumulate(sizes.values()))
        places = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        for name in config.states or ():
            rule = f"the state vectors of {config.task} are {', '.join(places)}"
            require(name in places, "env.states", name, rule, "name some of these, or null for all")
        return {name: places[name] for name in (config.states or places)}

    def _told(self, rows: Sequence[int]) -> tuple[str, ...]:
        tasks = self.row_tasks()
        texts = [tasks[row].instruction for row in rows]
        if self._config.perturb.instruction:
            drawn = words(self._config.perturb.seed, "perturb words", [self._seeds[row] for row in rows])
            texts = [_PARAPHRASES[n].format(text) for n, text in zip(drawn % len(_PARAPHRASES), texts, strict=True)]
        return tuple(texts)

    def _privileged(self) -> Tensor:
        """Returns the critic's state [N, Q]: the task's, then the CLOCK_COLUMNS."""
        if self._shown is None:
            known = self._state.proprio if self._state.privileged is None else self._state.privileged
            held = self._hold_column[self._held.clamp(max=len(self._hold_column) - 1)]
            self._shown = torch.cat([known, self._time_columns[self._steps], held], 1)
        return self._shown

    def _observe(self) -> Observation:
        """Returns the observation of all rows; frozen ones are black."""
        if not self.spec.cameras:
            return self.state()
        self._render()
        for images in (*self._images.values(), *self._past_images.values()):
            images[~self._running] = 0
        self._unseen.update((~self._running).nonzero()[:, 0].tolist())
        shown = {name: self._visible(self._past_images[name], seen).clone() for name, seen in self._images.items()}
        return replace(self.state(), images=shown)

    def _visible(self, past: Tensor, now: Tensor, rows: list[int] | None = None) -> Tensor:
        """Returns what is seen, late by env.perturb, of env steps before [N, ages, ...] and now, [N, ...] or of `rows`.

        That is [N, history, ...], oldest first; without a history there is no such axis.
        """
        if not past.shape[1]:
            return now
        how, of = self._config.perturb, slice(None) if rows is None else rows
        late = torch.full_like(self._steps, how.observation_delay)
        if how.observation_jitter:
            drawn = uniform(how.seed, "observation delay", self._seeds, self._steps.cpu().numpy())
            late += torch.from_numpy(drawn * (how.observation_jitter + 1)).long().to(late)
        last = past.shape[1] - late[of, None]
        seen = torch.cat([past[of], now[:, None]], 1)
        index = last + torch.arange(1 - self._config.history, 1, device=last.device)
        found = seen[torch.arange(len(seen), device=last.device)[:, None], index]
        return found if self._config.history > 1 else found[:, 0]

    def _shown_later(self, step: int) -> bool:
        """Whether the policy may see images of an env step later on, as it always may those of the first."""
        first, last = self._ages
        return step == 0 or any((step + age) % self._config.executed == 0 for age in range(first, last + 1))

    def _render(self) -> None:
        """Renders the running rows that changed, at the start of an episode as the env steps before it, too."""
        runs = self._running.tolist()
        rows = sorted(row for row in self._unseen if runs[row])
        for name, images in self._rendered(rows).items() if rows and self._images else ():
            self._images[name][rows] = images
            begun = [row for row in rows if self._steps[row] == 0]
            self._past_images[name][begun] = self._images[name][begun][:, None]
        self._unseen.difference_update(rows)

    def _observe_final(self, images: Mapping[int, Mapping[str, Tensor]]) -> Observation:
        """Returns the last observation of rows whose episodes ended, with the images of that moment by row."""
        rows, several = list(images), list(images.values())
        return Observation(
            state=self._split(self._visible(self._past_proprio, self._state.proprio)[rows]),
            instruction=self._told(rows),
            images={name: torch.stack([seen[name] for seen in several]) for name in several[0]},
            privileged=self._privileged()[rows],
        )

    def _rendered(self, rows: list[int]) -> dict[str, Tensor]:
        """Returns the images of these rows by camera.

        Raises:
            SimulatorError: a camera's images are missing, or have another form than the env's features say.
        """
        seen = self.simulator.images(rows)
        for name, kept in self._images.items():
            found, wanted = seen.get(name), (len(rows), *kept.shape[1:])
            if found is None or found.dtype != torch.uint8 or tuple(found.shape) != wanted:
                came = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise SimulatorError(
                    f"{type(self.simulator).__name__}.images returned {came} for camera {name}, but uint8 "
                    f"{list(wanted)} is needed: return a dict of each camera of env.cameras, of env.obs_size pixels or "
                    "as image_sizes says"
                )
        return {name: seen[name] for name in self._images}

    def _split(self, proprio: Tensor) -> dict[str, Tensor]:
        return {name: proprio[..., place] for name, place in self._vectors.items()}

    # ---------------------------------------------------------------------------------------------------------- checks
    def _checked(self, actions: Tensor, chunk: tuple[int, ...]) -> Tensor:
        """Returns actions [N, *chunk, A] as float32 on the simulator's device.

        Raises:
            SimulatorError: wrong shape, or not finite in running rows.
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


def _moved_on(past: Tensor, now: Tensor) -> Tensor:
    """Returns the env steps before the next one, of those before [N, ages, ...] the present one [N, ...]."""
    return torch.cat([past[:, 1:], now[:, None]], 1)
