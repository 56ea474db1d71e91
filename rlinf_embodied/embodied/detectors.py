"""What makes the number of an evaluation misleading: looked for in every evaluation, and warned of.

env stage     Watch: states, images, actions and successes of each row's episode -> WatchedEpisode;
              after the first round each row but the first begins the episode of the row before it
policy stage  the largest change of a row's action when the other rows of its call change
driver        `warnings`: what of it is suspicious
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import ChunkResult, EnvSpec, EpisodeEnd, Observation

_RARE = 0.02  # share of episodes below which nothing is said
_SATURATED = 0.8  # share of an action's components at the ends of their range, above which it is suspicious
_EDGE = 0.999
_MIXED = 1e-3  # change of an action, in its range of 2
_ANOTHER = 0.1  # difference of two images of one start, as a share of that between episodes: renders may be inexact


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEpisode(EpisodeEnd):
    """A finished episode, and what was observed of it in addition to its metrics."""

    instruction: str  # that the policy got
    state: str  # digest of its first state vectors
    images: str  # digest of its first images, "" without
    changed: bool  # whether another row began it with other images
    first_success: int | None  # env steps before it, 0: solved at reset; None: never
    moved: bool  # whether any state vector changed
    actions: tuple[float, float, float] | None  # lowest, highest, share at the ends of the range; None: the expert's
    video: str = ""  # name of its file


class Watch:
    """Watches the episodes of N rows."""

    def __init__(self, observation: Observation, solved: Tensor | None) -> None:
        """Begins with what the rows show at the start of their episodes, and whether they are solved [N], if known."""
        n = len(observation)
        self._first = self._shown = observation
        self._changed = [False] * n
        self._states = [_digest(row) for row in observation.proprio.cpu()]
        self._images = ["" for _ in range(n)]
        for images in observation.images.values():
            self._images = [_digest(image, before) for image, before in zip(images.cpu(), self._images, strict=True)]
        self._success: list[int | None] = [None if solved is None or not solved[row] else 0 for row in range(n)]
        self._moved = torch.zeros(n, dtype=torch.bool)
        self._steps = torch.zeros(n, dtype=torch.long)
        self._actions: list[list[Tensor]] = [[] for _ in range(n)]

    def step(self, actions: Tensor | None, result: ChunkResult) -> None:
        """Adds what a chunk [N, C, A] led to; None: the actions of an expert."""
        before, after, valid = self._shown.proprio.cpu(), result.observation.proprio.cpu(), result.valid.cpu()
        self._moved |= (before != after).any(1)
        for row in valid.any(1).nonzero()[:, 0].tolist():
            solved = (result.success[row].cpu() & valid[row]).nonzero()
            if len(solved) and self._success[row] is None:
                self._success[row] = int(self._steps[row]) + int(solved[0]) + 1
            if actions is not None:
                self._actions[row].append(actions[row].cpu()[valid[row]])
        self._steps += valid.sum(1)
        self._shown = result.observation

    def compare_rows(self, rows: Sequence[int], again: Observation) -> None:
        """Compares the first images of episodes with those that another row shows of the same starts.

        In `again` each of `rows` begins the episode of the row before it, except the first, whose state is old.  This
        detects every fixed assignment p of rows to the rows whose images they show, if starts look different: as row
        k + 1 shows what row k did, p(k) = p(k + 1) - 1, so p(k) = p(0) + k; no p(k) exceeds the last row, so p(0) = 0.
        """
        first, second = (torch.cat([i.flatten(1).cpu() for i in o.images.values()], 1) for o in (self._first, again))
        distance = lambda a, b: float((a.float() - b.float()).abs().mean())  # noqa: E731
        pairs = list(itertools.pairwise(rows))
        usual = sum(distance(first[row], first[after]) for row, after in pairs) / len(pairs)
        for row, after in pairs:
            self._changed[row] = distance(first[row], second[after]) > _ANOTHER * usual

    def episode(self, end: EpisodeEnd, env_id: int, video: str) -> WatchedEpisode:
        """Returns a row's episode, under the row's number over all blocks."""
        row = end.row
        chosen = torch.cat(self._actions[row]) if self._actions[row] else None
        seen = None
        if chosen is not None:
            saturated = (chosen.abs() >= _EDGE).float().mean()
            seen = float(chosen.min(0).values.sum()), float(chosen.max(0).values.sum()), float(saturated)
        return WatchedEpisode(
            *(env_id, end.seed, dict(end.metrics), end.task, end.task_instruction),
            instruction=self._shown.instruction[row],
            state=self._states[row],
            images=self._images[row],
            changed=self._changed[row],
            first_success=self._success[row],
            moved=bool(self._moved[row]) or not self._shown.proprio.shape[1],
            actions=seen,
            video=video,
        )


def _digest(values: Tensor, before: str = "") -> str:
    return hashlib.blake2b(before.encode() + values.numpy().tobytes(), digest_size=8).hexdigest()


def warnings(
    episodes: Sequence[WatchedEpisode], mixed: float, spec: EnvSpec, seen: Mapping[str, set[int]]
) -> list[str]:
    """Returns what is suspicious about an evaluation, a sentence each.

    Args:
        episodes: those that were run.
        mixed: by how much a row's action changed with the other rows of its call.
        spec: the env's facts.
        seen: seeds that training has used, by what for.
    """
    number, found = len(episodes), list[str]()

    def note(count: int, text: str, rare: float = max(2, _RARE * number)) -> None:
        if count >= rare:
            found.append(f"{count} of {number} episodes {text}")

    note(sum(e.first_success == 0 for e in episodes), "begin solved")
    late = sum((e.first_success or 0) > 0.9 * spec.horizon for e in episodes)
    note(late, f"are first solved in the last tenth of env.horizon={spec.horizon}: a longer one would solve more")
    note(sum(not e.moved for e in episodes), "end in the state they began in: actions may not reach the simulator")
    starts = Counter((e.state, e.images, e.instruction) for e in episodes)
    note(number - len(starts), "begin as an earlier one does: the interval takes them for independent")
    images = {e.images: e.state for e in episodes if e.images}
    alike = sum(e.images != "" and images[e.images] != e.state for e in episodes)
    note(alike, "begin with the images of another state: rows may show another row's")
    changed = sum(e.changed for e in episodes)
    note(changed, "begin with other images in another row: rows may show another row's", rare=1)
    wrong = sum(e.task_instruction not in ("", e.instruction) for e in episodes)
    note(wrong, "have an instruction that is not their task's: rows may get another row's", rare=1)
    for kind, seeds in seen.items():
        note(sum(e.seed in seeds for e in episodes), f"have seeds that were used before, for {kind}")
    if mixed > _MIXED:
        found.append(f"a row's action changes by {mixed:.2g} with the other rows of a policy call: rows are mixed up")
    chosen = [e.actions for e in episodes if e.actions is not None]
    if chosen and not spec.categorical:
        low, high = min(a[0] for a in chosen), max(a[1] for a in chosen)
        saturated = sum(a[2] for a in chosen) / len(chosen)
        if high - low < 1e-6:
            found.append("all actions of all episodes are the same")
        elif saturated > _SATURATED:
            found.append(f"{saturated:.0%} of the actions' components are at the ends of [-1, 1]: are they normalised?")
    return found


def seeds_of_training(checkpoint: Path) -> dict[str, set[int]]:
    """Returns the seeds below those of training that made a checkpoint what it is, by what they were used for.

    Read from the config in it and the recordings that this names; what cannot be read is left out.
    """
    import yaml

    def load(path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    found = dict[str, set[int]]()
    config = yaml.safe_load(load(checkpoint / "state.json").get("config", "")) or {}
    how, start = config.get("eval", {}), config.get("warm_start", {})
    if config.get("run", {}).get("until_success") is not None:
        found["checks"] = set(range(how["check_seed"], how["check_seed"] + how["check_episodes"]))
    elif how.get("every") and checkpoint.resolve().parent.name == "best":
        found["the choice of this checkpoint"] = set(range(how["seed"], how["seed"] + how["num_episodes"]))
    files = [start.get("demonstrations"), *str(config.get("data") or "").split(",")]
    for file in (Path(str(name).strip()) for name in files if str(name).strip().endswith(".h5")):
        recorded = [entry.get("episode_seed") for entry in load(file.with_suffix(".json")).get("episodes", [])]
        found.setdefault("demonstrations", set()).update(seed for seed in recorded if isinstance(seed, int))
    return found
