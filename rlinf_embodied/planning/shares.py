"""Shares of a stage's blocks that a search tries: by the speed of unlike devices, and a little off that.

Devices alike share evenly; where blocks do not divide, the remainder may go to the last devices in place of the first.

A slow device with an even share is often worse than none: stages get further devices together with their shares.
And a stage that is as fast on all of its devices may leave one of them to a stage that is not.

A share is a whole number of units: as many blocks as a stage works on together, or, where its blocks come in k chunks,
k of them, so that each chunk is shared alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlinf_embodied.planning.calls import owners
from rlinf_embodied.planning.sketch import Sketch
from rlinf_embodied.planning.tree import Devices, Leaf, Shares
from rlinf_embodied.workflow.graph import Workflow

Slowdown = Callable[[str, int], float]  # of a stage on a device


def all_alike(stage: str, device: int) -> float:
    """Returns that a stage takes on a device what it takes anywhere."""
    return 1.0


class ShareMoves:
    """The neighbours of a sketch with other shares, for one workflow and cluster."""

    def __init__(self, workflow: Workflow, everywhere: Devices, slowdown: Slowdown) -> None:
        """Takes what is planned, all devices, and how much longer each stage takes on each than on the fastest."""
        self.work, self.everywhere = workflow, everywhere
        self.speeds = {stage: [1.0 / slowdown(stage, device) for device in everywhere] for stage in workflow.stages}
        self.unlike = self._are_unlike(everywhere)
        number = {stage: i for i, stage in enumerate(workflow.stages)}
        self.loops = [tuple(number[side] for side in loop.sides) for loop in workflow.loops.values()]
        self.fewest = tuple(min(loop.shards) for loop in workflow.loops.values())

    def around(self, sketch: Sketch) -> Iterator[Sketch]:
        """Yields sketches in which some stages share their blocks differently."""
        if not self.unlike:
            yield from self._mirrored(sketch)
            return
        for start in dict.fromkeys((sketch, replace(sketch, shards=self.fewest))):
            for together in self._together(start):
                for devices, shares in self._shares(start, together):
                    other = start.placed(dict.fromkeys(together, devices))
                    changes = dict.fromkeys(together, shares)
                    yield replace(other, shares=tuple(changes.get(i, own) for i, own in enumerate(other.shares)))

    def _mirrored(self, sketch: Sketch) -> Iterator[Sketch]:
        """Yields sketches in which the last devices have what is left over, not the first, and the other way round.

        Where blocks do not divide evenly, stages that take turns are faster if it is not the same device each time.
        """
        sides = {i for loop in self.loops for i in loop}
        for together in [*((i,) for i in range(len(sketch.devices)) if i not in sides), *self.loops]:
            stage, own = list(self.work.stages)[together[0]], sketch.devices[together[0]]
            if any(sketch.devices[i] != own for i in together):
                continue
            unit, least = self._unit(sketch, together)
            even = self._even(stage, own, unit)
            if even[0] == even[-1] or min(even) < least * unit:
                continue
            shares = () if sketch.shares[together[0]] else tuple(reversed(even))
            changes = dict.fromkeys(together, shares)
            yield replace(sketch, shares=tuple(changes.get(i, now) for i, now in enumerate(sketch.shares)))

    def mended(self, sketch: Sketch) -> Sketch:
        """Returns a sketch whose shares suit its chunks: those that do not are as even as possible."""
        if not any(sketch.shares):
            return sketch
        units = self._units(sketch)
        kept = (s if not any(n % unit for n in s) else () for s, unit in zip(sketch.shares, units, strict=True))
        return replace(sketch, shares=tuple(kept))

    def _together(self, sketch: Sketch) -> Iterator[tuple[int, ...]]:
        """Yields stages (by number) that may change their shares together: alone, a loop's sides, on alike devices."""
        yield from ((i,) for i in range(len(sketch.devices)))
        yield from self.loops
        for devices in dict.fromkeys(sketch.devices):
            alike = tuple(i for i, own in enumerate(sketch.devices) if own == devices)
            yield from (some for some in itertools.combinations(alike, 2) if some not in self.loops)
            if len(alike) > 2:
                yield alike

    def _shares(self, sketch: Sketch, together: Sequence[int]) -> Iterator[tuple[Devices, Shares]]:
        """Yields devices with shares for stages: those of the first, with one more or less, or all of them."""
        stage, own = list(self.work.stages)[together[0]], sketch.devices[together[0]]
        unit, least = self._unit(sketch, together)
        more = (tuple(sorted((*own, device))) for device in self.everywhere if device not in own)
        less = (tuple(d for d in own if d != device) for device in own if len(own) > 1)
        for devices in dict.fromkeys((own, *more, *less, self.everywhere)):
            shares = self._by_speed(stage, devices, unit, least)
            if shares:
                yield devices, shares
        now = list(sketch.shares[together[0]] or self._even(stage, own, unit))
        if not self._are_unlike(own) or min(now) < unit:
            return
        for a, b in itertools.permutations(range(len(own)), 2):
            if now[a] - unit >= least * unit:
                yield own, tuple(n + unit * ((i == b) - (i == a)) for i, n in enumerate(now))

    def by_speed(self, sketch: Sketch) -> Sketch:
        """Returns a sketch in which every stage on unlike devices shares its blocks by their speeds."""
        units = (self._unit(sketch, (i,)) for i in range(len(sketch.devices)))
        placed = zip(self.work.stages, sketch.devices, units, strict=True)
        return replace(sketch, shares=tuple(self._by_speed(s, own, *unit) for s, own, unit in placed))

    def _by_speed(self, stage: str, devices: Devices, unit: int, least: int) -> Shares:
        """Returns shares in proportion to a stage's speeds; () where all devices are alike, or blocks too few."""
        speeds = [self.speeds[stage][device] for device in devices]
        if min(speeds) == max(speeds) or min(speeds) <= 0.0:
            return ()
        return tuple(n * unit for n in in_proportion(speeds, self.work.num_blocks // unit, least))

    def _unit(self, sketch: Sketch, together: Sequence[int]) -> tuple[int, int]:
        """Returns the blocks of which stages' shares are multiples, and how many of these each device has at least."""
        unit = math.lcm(*(self._units(sketch)[i] for i in together))
        pairs = zip(self.loops, sketch.shards, strict=True)
        return unit, max((-(-count // unit) for ends, count in pairs if set(ends) & set(together)), default=1)

    def _are_unlike(self, devices: Devices) -> bool:
        return len({tuple(speeds[device] for speeds in self.speeds.values()) for device in devices}) > 1

    def _even(self, stage: str, devices: Devices, unit: int) -> list[int]:
        """Returns how many blocks each device has where they share evenly, in whole units."""
        number = self.work.num_blocks // unit
        found = owners(Leaf(stage, devices), number, number)
        return [found.count(device) * unit for device in devices]

    def _units(self, sketch: Sketch) -> list[int]:
        """Returns the blocks of which each stage's shares are multiples."""
        chunks = {stage: item.chunks for item in sketch.items for stage in item.units()}
        sizes = ((stage, spec.blocks_per_batch) for stage, spec in self.work.stages.items())
        return [size if size > 1 else chunks.get(stage, 1) for stage, size in sizes]


def in_proportion(speeds: Sequence[float], number: int, least: int = 1) -> tuple[int, ...]:
    """Returns `number` things divided in proportion to speeds, at least so many for each; () where they are too few."""
    if number < least * len(speeds):
        return ()
    whole = [max(least, math.floor(number * speed / sum(speeds))) for speed in speeds]
    while sum(whole) != number:
        more = sum(whole) < number
        time = [(n + more) / speed for n, speed in zip(whole, speeds, strict=True)]
        if more:
            whole[min(range(len(whole)), key=lambda i: time[i])] += 1
        else:
            whole[max((i for i in range(len(whole)) if whole[i] > least), key=lambda i: time[i])] -= 1
    return tuple(whole)
