"""Finds what is wrong with datasets before anything learns from them: LeRobot v2 and v3, RLDS.

python experiments/check_dataset.py data=runs/pick,runs/others

prints a line per finding: what it is, where it begins, what was measured, what to do.

    index         episode, frame and running numbers, totals of meta/info.json, lengths, columns that every frame has
    timestamps    against the frame rate
    values        not finite; constant; units that differ between episodes, between actions and state, or from names
    quaternions   not of length 1, a sign that changes from one frame to the next
    duplicates    episodes, and frames that are stored twice
    actions       late, of another control mode, columns swapped or with the other sign, compared with the state
    tasks         missing, empty, twice
    statistics    meta/stats.json against the frames
    images        missing or unreadable, of another size, of one colour, not changing while the state does, of another
                  scene from one frame on

Actions are compared with the state where they have a clear relation: entry i of the action is entry i of a state a few
frames later (absolute), or its change (relative).  Otherwise nothing is said about them.
All images are decoded, which takes minutes for thousands of frames; `images=false` leaves them out.

Exit code 0: nothing found; 1: something was found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_embodied.command_line import main
from rlinf_embodied.data.recorded import ACTION, RecordedDataset
from rlinf_embodied.data.statistics import Statistics
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.errors import DataError

_TIME_TOLERANCE_S = 1e-4  # LeRobot's
_FACTORS = {57.3: "degrees and radians", 1000.0: "millimetres and metres", 100.0: "centimetres or percent"}
_OTHER_UNITS = 20.0  # factor between episodes from which their units differ
_CLEAR, _UNCLEAR = 0.8, 0.6  # correlations of actions with the state
_LONG = 20  # frames from which an episode alone tells how its actions relate to the state
_LAGS = range(-3, 7)  # frames from an action to the state that it leads to
_LONGEST_LAG_S = 1.0
_STILL = 0.3  # mean change of pixels, of 255, up to which two frames are the same
_CUT, _CUT_FACTOR = 20.0, 3.0  # mean change of pixels between scenes, and its factor to the next largest change
_ONE_COLOUR = 1.0  # standard deviation of pixels, of 255
_IMAGE_STATISTICS = 0.05  # share of 255 that videos may change
_SIDE, _BATCH = 64, 64  # pixels of the thinned images that are compared; frames decoded at a time
_COPY = "record or copy it anew, or leave it out"
_NEEDED = ("timestamp", "frame_index", "task_index")  # of every frame


@dataclass(kw_only=True, slots=True)
class DatasetCheckConfig:
    """Everything that experiments/check_dataset.py reads."""

    data: str  # folders of LeRobot or RLDS, joined by commas
    images: bool = True  # decode them


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: what it is, where it begins, what was measured, and what to do."""

    what: str
    where: str
    measured: str
    action: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}: {self.measured}: {self.action}"


def find_faults(dataset: RecordedDataset, folder: Path, images: bool = True) -> list[Finding]:
    """Returns the faults in a dataset folder; images are decoded once, unless `images` is False."""
    try:
        missing = [name for name in _NEEDED if name not in dataset.columns]
    except DataError as error:
        return [Finding("frames cannot be read", str(folder), str(error), _COPY)]
    if missing:
        return [
            Finding("missing columns", "meta/info.json, features", ", ".join(missing), "add them, or record it anew")
        ]
    path = folder / "meta/info.json"
    found = list(_index(dataset, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}))
    for check in (_timestamps, _values, _units, _quaternions, _equal_episodes, _actions, _tasks, _statistics):
        found += check(dataset)
    still = np.ones(len(dataset), bool)  # whether no camera's image differs from that of the frame before
    cameras = list(dataset.cameras) if images else []
    for camera in cameras:
        found += _images(dataset, camera, still)
    return found + list(_repeated(dataset, still, "state, actions and images" if cameras else "state and actions"))


# -------------------------------------------------------------------------------------------------------------- places
def _episode(dataset: RecordedDataset, number: int) -> str:
    return f"episode {int(dataset.columns['episode_index'][dataset.frames(number).start])}"


def _place(dataset: RecordedDataset, row: int, name: str = "", entry: int | None = None) -> str:
    number = int(np.searchsorted(dataset.ends, row, side="right"))
    place = f"{_episode(dataset, number)}, frame {row - dataset.frames(number).start}"
    return f"{place}, {_entry(dataset, name, entry)}" if name else place


def _entry(dataset: RecordedDataset, name: str, entry: int | None) -> str:
    if entry is None:
        return name
    names = _names(dataset, name)
    return f"{name}[{entry}]" + (f" ({names[entry]})" if entry < len(names) else "")


def _names(dataset: RecordedDataset, name: str) -> list[str]:
    """Returns the names of a feature's entries, [] without any."""
    names = dataset.features.get(name, {}).get("names") or []
    return [str(n) for group in names.values() for n in group] if isinstance(names, dict) else list(map(str, names))


def _vectors(dataset: RecordedDataset) -> dict[str, np.ndarray]:
    """Actions and state, float64 [F, D] by feature."""
    names = [name for name in (ACTION, *dataset.states) if name in dataset.columns]
    return {name: dataset.columns[name].reshape(len(dataset), -1).astype(np.float64) for name in names}


def _rows(dataset: RecordedDataset) -> Iterator[tuple[int, slice]]:
    for number in range(dataset.num_episodes):
        rows = dataset.frames(number)
        yield number, slice(rows.start, rows.stop)


# ------------------------------------------------------------------------------------------------------------- numbers
def _index(dataset: RecordedDataset, info: Mapping[str, Any]) -> Iterator[Finding]:
    counted, starts = np.arange(len(dataset)), np.repeat(dataset.ends - dataset.lengths, dataset.lengths)
    episodes = np.repeat(np.arange(dataset.num_episodes), dataset.lengths)
    for name, wanted in (("frame_index", counted - starts), ("index", counted), ("episode_index", episodes)):
        if len(wrong := np.flatnonzero(dataset.columns.get(name, wanted) != wanted)):
            row = int(wrong[0])
            measured = f"{len(wrong)} frames, the first has {dataset.columns[name][row]} and not {wanted[row]}"
            yield Finding("wrong numbers", _place(dataset, row, name), measured, "number from 0 without gaps")
    usual = float(np.median(dataset.lengths))
    for number in np.flatnonzero((dataset.lengths < 2) | (dataset.lengths < 0.1 * usual)).tolist():
        measured = f"{dataset.lengths[number]} frames, the median is {usual:g}"
        yield Finding("short episode", _episode(dataset, number), measured, "leave it out")
    for name, found in (("total_episodes", dataset.num_episodes), ("total_frames", len(dataset))):
        if (promised := info.get(name, found)) != found:
            measured = f"{promised}, but meta/episodes has {found}"
            yield Finding("wrong total", f"meta/info.json, {name}", measured, "copy what is missing, or correct it")


def _timestamps(dataset: RecordedDataset) -> Iterator[Finding]:
    times = dataset.columns["timestamp"].astype(np.float64).reshape(-1)
    for _, rows in _rows(dataset):  # all of them lie on one line if only the frame rate is wrong
        steps = np.diff(times[rows])
        step = float(np.median(steps)) if len(steps) else 1 / dataset.fps
        if step > 0 and abs(step - 1 / dataset.fps) > _TIME_TOLERANCE_S:
            measured = f"{1 / step:.4g} frames per second in the data, fps is {dataset.fps:g}"
            yield Finding("wrong frame rate", _place(dataset, rows.start, "timestamp"), measured, "correct fps")
            return
    wanted = dataset.columns["frame_index"] / dataset.fps
    wrong = np.flatnonzero(np.abs(times - wanted) > np.maximum(_TIME_TOLERANCE_S, 2e-7 * wanted))
    if len(wrong):
        row = int(wrong[0])
        measured = f"{len(wrong)} frames, the first at {times[row]:.4f} s and not {wanted[row]:.4f} s"
        action = "use frame_index / fps, or resample the episode"
        yield Finding("wrong timestamps", _place(dataset, row, "timestamp"), measured, action)


# -------------------------------------------------------------------------------------------------------------- values
def _values(dataset: RecordedDataset) -> Iterator[Finding]:
    for name, column in dataset.columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            wrong = np.argwhere(~np.isfinite(column.reshape(len(dataset), -1)))
            where = _place(dataset, int(wrong[0][0]), name, int(wrong[0][1]))
            yield Finding("not finite", where, f"{len(wrong)} values", _COPY)
    for name in dataset.states:
        for number, rows in _rows(dataset):
            part = dataset.columns[name][rows]
            if len(part) > 2 and (part == part[0]).all() and (dataset.columns[name] != part[0]).any():
                where = f"{_episode(dataset, number)}, {name}"
                yield Finding("constant state", where, f"the same in {len(part)} frames", _COPY)


def _units(dataset: RecordedDataset) -> Iterator[Finding]:
    """Compares the largest values of episodes with each other, and those of x, y and z with an arm's reach."""
    for name, values in _vectors(dataset).items():
        largest = np.stack([np.abs(values[rows]).max(0) for _, rows in _rows(dataset)])  # [E, D]
        usual = np.median(largest, 0)
        for number, episode in enumerate(largest):
            ratios = episode[usual > 0] / usual[usual > 0]
            ratio = float(np.median(ratios)) if len(ratios) else 1.0
            if not 1 / _OTHER_UNITS < ratio < _OTHER_UNITS and ratio > 0:
                where, likely = f"{_episode(dataset, number)}, {name}", _likely(ratio)
                measured = f"its values are {ratio:.3g} times those of the other episodes ({likely})"
                yield Finding("other units", where, measured, "convert the episode")
        for entry, word in enumerate(_names(dataset, name)[: values.shape[1]]):
            if re.fullmatch(r"(.*[_.])?[xyz]", word) and (high := float(np.abs(values[:, entry]).max())) > 10:
                row = int(np.abs(values[:, entry]).argmax())
                yield Finding("no metres", _place(dataset, row, name, entry), f"{high:.4g}", "convert it to metres")


def _likely(ratio: float) -> str:
    ratio = max(ratio, 1 / ratio)
    factor = min(_FACTORS, key=lambda f: abs(np.log(ratio / f)))
    return f"as {_FACTORS[factor]}" if abs(np.log(ratio / factor)) < 0.35 else "no common unit"


def _quaternions(dataset: RecordedDataset) -> Iterator[Finding]:
    for name, values in _vectors(dataset).items():
        words, size = _names(dataset, name), values.shape[1]
        starts = [k for k in range(len(words) - 3) if {w[-1:] for w in words[k : k + 4]} == {*"xyzw"}]
        if re.search(r"wxyz|xyzw|quat", name) and size in (4, 7):
            starts = [size - 4]
        for start in starts:
            four = values[:, start : start + 4]
            off = np.abs(np.linalg.norm(four, axis=1) - 1)
            if off.max() > 0.01:
                row = int(off.argmax())
                measured = f"its length is {np.linalg.norm(four[row]):.3f}"
                yield Finding("no unit quaternion", _place(dataset, row, name, start), measured, "normalise it")
                continue
            turned = (four[1:] * four[:-1]).sum(1) < -0.5
            turned[dataset.ends[:-1] - 1] = False
            if turned.any():
                row = int(np.flatnonzero(turned)[0]) + 1
                action = "keep the sign that is nearer to the frame before: both are the same rotation"
                where = _place(dataset, row, name, start)
                yield Finding("quaternion changes its sign", where, f"{turned.sum()} times", action)


# ---------------------------------------------------------------------------------------------------------- duplicates
def _equal_episodes(dataset: RecordedDataset) -> Iterator[Finding]:
    seen: dict[bytes, int] = {}
    vectors = [*_vectors(dataset).values()]
    for number, rows in _rows(dataset):
        first = seen.setdefault(b"".join(values[rows].tobytes() for values in vectors), number)
        if first != number and vectors:
            measured = f"its {dataset.lengths[number]} frames equal those of {_episode(dataset, first)}"
            yield Finding("duplicate episode", _episode(dataset, number), measured, "leave it out")


def _repeated(dataset: RecordedDataset, still: np.ndarray, what: str) -> Iterator[Finding]:
    """A frame that equals the one before while the robot moves before and behind it; longer ones are pauses."""
    vectors = [*_vectors(dataset).values()]
    same = still.copy() if vectors else np.zeros(len(dataset), bool)
    for values in vectors:
        same[1:] &= (values[1:] == values[:-1]).all(1)
    found = []
    for _, rows in _rows(dataset):
        part = same[rows]
        part[:1] = True  # of the beginning nothing is known
        found += [rows.start + k for k in range(1, len(part) - 1) if part[k] and not part[k - 1] and not part[k + 1]]
    if found:
        measured = f"{len(found)} frames equal the one before in {what}"
        yield Finding("duplicate frames", _place(dataset, found[0]), measured, "leave them out")


# ------------------------------------------------------------------------------------------------ actions and the state
def _correlations(dataset: RecordedDataset, relative: bool, lag: int, episodes: Sequence[int]) -> np.ndarray:
    """Returns correlations of each action entry with each state entry `lag` frames later, or its change; [A, P]."""
    actions, states = [], []
    for number in episodes:
        rows = dataset.frames(number)
        action, state = (x[rows.start : rows.stop].astype(np.float64) for x in (dataset.columns[ACTION], dataset.state))
        at = np.arange(max(0, int(relative) - lag), len(rows) - max(0, lag))
        actions.append(action[at])
        states.append(state[at + lag] - (state[at + lag - 1] if relative else 0))
    a, s = (np.concatenate(part) for part in (actions, states))
    if len(a) < 8:
        return np.zeros((dataset.columns[ACTION].shape[1], dataset.state.shape[1]))
    a, s = a - a.mean(0), s - s.mean(0)
    size = np.sqrt(np.outer((a**2).sum(0), (s**2).sum(0)))
    return np.where(size > 1e-12, a.T @ s / np.maximum(size, 1e-12), np.nan)


def _relation(dataset: RecordedDataset, episodes: Sequence[int]) -> dict[tuple[bool, int], float]:
    """Returns how well actions are (relative?, lag) states: the median over entries, 0 where that means nothing."""
    found = {}
    for relative in (False, True):
        for lag in _LAGS:
            diagonal = np.diag(_correlations(dataset, relative, lag, episodes))
            known = diagonal[np.isfinite(diagonal)]
            found[relative, lag] = float(np.median(np.abs(known))) if len(known) else 0.0
    return found


def _actions(dataset: RecordedDataset) -> Iterator[Finding]:
    finite = all(np.isfinite(values).all() for values in _vectors(dataset).values())
    if dataset.size(ACTION) is None or not dataset.states or not finite:
        return
    everything = range(dataset.num_episodes)
    score = _relation(dataset, everything)
    relative, lag = max(score, key=lambda key: score[key])
    if score[relative, lag] < _CLEAR:
        return
    allowed = [k for k in _LAGS if 0 <= k <= max(3, _LONGEST_LAG_S * dataset.fps)]
    best = max(score[relative, k] for k in allowed)
    if lag not in allowed and 1 - score[relative, lag] < 0.5 * (1 - best):
        measured = f"they follow the state of {-lag} frames before" if lag < 0 else f"of {lag} frames later"
        yield Finding("late actions" if lag < 0 else "early actions", f"all episodes, {ACTION}", measured, "shift them")
    size = min(dataset.columns[ACTION].shape[1], dataset.state.shape[1])
    if np.array_equal(dataset.columns[ACTION][:, :size], dataset.state[:, :size]):
        yield Finding("actions are the state", ACTION, "equal in every frame", "use the state of the next frame")
    matrix = _correlations(dataset, relative, lag, everything)
    own = np.nan_to_num(np.diag(matrix))
    for i in range(size):
        if own[i] < -_CLEAR:
            where = _entry(dataset, ACTION, i)
            yield Finding("action with the other sign", where, f"correlation {own[i]:.2f} with the state", "negate it")
        for j in range(i + 1, size):
            if min(matrix[i, j], matrix[j, i]) > _CLEAR and max(own[i], own[j]) < _UNCLEAR:
                where = f"{_entry(dataset, ACTION, i)} and {_entry(dataset, ACTION, j)}"
                measured = f"correlations {matrix[i, j]:.2f} and {matrix[j, i]:.2f} with each other's state"
                yield Finding("action columns swapped", where, measured, "swap them")
    if not relative:
        action, state = (x[:, :size][:, own > _CLEAR].std(0) for x in (dataset.columns[ACTION], dataset.state))
        ratio = float(np.median(action / state)) if len(action) else 1.0
        if not 1 / _OTHER_UNITS < ratio < _OTHER_UNITS:
            measured = f"{ratio:.3g} times those of the state ({_likely(ratio)})"
            yield Finding("actions in other units", ACTION, measured, "convert them")
    if dataset.num_episodes > 2:
        yield from _odd_episodes(dataset, relative, lag)


def _odd_episodes(dataset: RecordedDataset, relative: bool, lag: int) -> Iterator[Finding]:
    """Episodes whose actions relate to the state in another way than those of all."""
    for number in range(dataset.num_episodes):
        score = _relation(dataset, [number]) if dataset.lengths[number] >= _LONG else {(relative, lag): 0.0}
        best = max(score, key=lambda key: score[key])
        if score[best] < _CLEAR or score[relative, lag] > 1 - 2 * (1 - score[best]):
            continue
        where = f"{_episode(dataset, number)}, {ACTION}"
        if best[0] != relative and score[relative, lag] < _UNCLEAR:
            of_all, of_this = ("relative", "absolute") if relative else ("absolute", "relative")
            measured = f"{of_this}, those of the other episodes are {of_all}"
            yield Finding("other control mode", where, measured, "convert them, or leave the episode out")
        elif best[0] == relative and abs(best[1] - lag) > 1:
            measured = f"{best[1]} frames to the state that they lead to, {lag} in the other episodes"
            yield Finding("late actions" if best[1] < lag else "early actions", where, measured, "shift them")


# ---------------------------------------------------------------------------------------------------------------- tasks
def _tasks(dataset: RecordedDataset) -> Iterator[Finding]:
    known: dict[int, str] = {}
    for row, number in enumerate(dataset.columns["task_index"].tolist()):
        if number in known:
            continue
        try:
            known[number] = dataset.task(row)
        except (KeyError, IndexError):
            known[number] = f"task {number}"
            measured = f"{number}, and there are {len(dataset.tasks)} tasks"
            yield Finding("unknown task", _place(dataset, row, "task_index"), measured, "add its words to meta/tasks")
        if known[number].strip().lower() in ("", "none", "null", "nan"):
            where, measured = _place(dataset, row, "task_index"), f"its words are {known[number]!r}"
            yield Finding("task without words", where, measured, "write what is to be done")
    words = [task.strip().lower() for task in dataset.tasks]
    for task in dict.fromkeys(task for task in words if words.count(task) > 1):
        yield Finding("equal tasks", "meta/tasks", f"{task!r} has {words.count(task)} numbers", "give them one number")


# ----------------------------------------------------------------------------------------------------------- statistics
def _statistics(dataset: RecordedDataset) -> Iterator[Finding]:
    for name in dataset.measured:
        if name not in dataset.columns or dataset.columns[name].dtype.kind not in "fi":
            if name not in dataset.features:
                yield Finding("statistics of nothing", name, "no such feature", "compute the statistics again")
            continue
        column = dataset.columns[name]
        if not np.isfinite(column).all():
            continue
        ours = dataset.compute_statistics(name)
        yield from _compared(name, dataset, ours, 1e-3 * np.maximum(ours["max"] - ours["min"], 1e-3))


def _compared(name: str, dataset: RecordedDataset, ours: Statistics, tolerance: np.ndarray) -> Iterator[Finding]:
    theirs, wrong = dataset.measured[name], []
    for kind in [kind for kind in ours if kind in theirs and kind != "count"]:
        if theirs[kind].shape != ours[kind].shape:
            measured = f"{kind} has the shape {list(theirs[kind].shape)}, the data {list(ours[kind].shape)}"
            yield Finding("statistics of another robot", f"meta/stats.json, {name}", measured, "compute them again")
            return
        off = np.abs(theirs[kind] - ours[kind])
        if not (off <= tolerance).all():
            k = int(np.nanargmax(off))
            wrong.append(f"{kind}[{k}] is {theirs[kind].flat[k]:.4g}, of the data {ours[kind].flat[k]:.4g}")
    if wrong:
        yield Finding("wrong statistics", f"meta/stats.json, {name}", "; ".join(wrong[:3]), "compute them again")


# --------------------------------------------------------------------------------------------------------------- images
def _images(dataset: RecordedDataset, camera: str, still: np.ndarray) -> Iterator[Finding]:
    """Decodes a camera's images, thinned; `still` loses the frames whose image differs from the one before."""
    feature, sums, sizes = dataset.cameras[camera], [], set()
    spread = np.maximum(dataset.state.std(0), 1e-9) if dataset.states else None
    static, plain = [], []
    for number, rows in _rows(dataset):
        batches = np.array_split(np.arange(rows.start, rows.stop), -(-(rows.stop - rows.start) // _BATCH))
        try:
            shown = np.concatenate([_thinned(dataset.images(camera, batch), sizes) for batch in batches])
        except DataError as error:
            still[rows] = False
            yield Finding("images cannot be read", f"{_episode(dataset, number)}, {feature}", str(error), _COPY)
            continue
        sums.append((len(shown), shown.mean((0, 1, 2)) / 255, (shown**2).mean((0, 1, 2)) / 255**2))
        change = np.abs(np.diff(shown, axis=0, prepend=shown[:1])).mean((1, 2, 3))
        quiet, largest = change < _STILL, np.sort(change)[-2:]
        if largest[-1] > _CUT and largest[-1] > _CUT_FACTOR * largest[0]:
            where = _place(dataset, rows.start + int(change.argmax()), feature)
            measured = f"pixels change by {largest[-1]:.0f} of 255, elsewhere by at most {largest[0]:.0f}"
            yield Finding("another scene", where, measured, "compare it with the frame before; cut the episode there")
        still[rows] &= quiet
        if (shown.std((1, 2)) < _ONE_COLOUR).all():
            plain.append((number, shown.mean()))
        elif spread is not None and (run := _static_run(quiet, dataset.state[rows] / spread, dataset.fps)):
            static.append((rows.start + run[0], run[1]))
    if plain:
        where = f"{_episode(dataset, plain[0][0])}, {feature}"
        measured = f"{len(plain)} episodes, brightness {plain[0][1]:.0f}"
        yield Finding("images of one colour", where, measured, "leave the camera or the episodes out")
    if static:
        measured = f"{len(static)} episodes; here {static[0][1]} frames do not change while the state does"
        yield Finding("static images", _place(dataset, static[0][0], feature), measured, "leave these frames out")
    if sizes - {dataset.image_size(camera)}:
        measured = f"{sorted(sizes)}, and features say {dataset.image_size(camera)}"
        yield Finding("other image size", feature, measured, "correct meta/info.json")
    if feature in dataset.measured and sums:
        count, means, squares = zip(*sums, strict=True)
        mean, square = (np.average(part, 0, count)[:, None, None] for part in (means, squares))
        ours = {"mean": mean, "std": np.sqrt(np.maximum(square - mean**2, 0))}
        yield from _compared(feature, dataset, ours, np.full((3, 1, 1), _IMAGE_STATISTICS))


def _thinned(images: np.ndarray, sizes: set[tuple[int, ...]]) -> np.ndarray:
    """Returns every few pixels of images, float32, and adds their size to `sizes`."""
    sizes.add(images.shape[1:3])
    step = max(1, max(images.shape[1:3]) // _SIDE)
    return images[:, ::step, ::step].astype(np.float32)


def _static_run(quiet: np.ndarray, state: np.ndarray, fps: float) -> tuple[int, int] | None:
    """Returns (first frame, frames) of the first long run of equal images in which the state changes."""
    for run in np.split(np.arange(len(quiet)), np.flatnonzero(~quiet)):  # each begins with a new image
        if len(run) >= max(5, fps / 2) and np.ptp(state[run], axis=0).max() > 0.5:
            return int(run[0]), len(run)
    return None


# ------------------------------------------------------------------------------------------------------------ command
def check(config: DatasetCheckConfig) -> int:
    total = 0
    for place in config.data.split(","):
        dataset = open_dataset(Path(place), "data")
        cameras = ", ".join(dataset.cameras) or "none"
        print(f"{place}: {dataset.num_episodes} episodes, {len(dataset)} frames, cameras {cameras}")
        faults = find_faults(dataset, Path(place), config.images)
        total += len(faults)
        print(*(f"  {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    print(f"{total} findings" if total else "nothing found")
    return 1 if total else 0


if __name__ == "__main__":
    main(check, DatasetCheckConfig)
