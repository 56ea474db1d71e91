"""Shares of a stage's blocks that a search tries where devices are unlike: by their speed, and a little off that.

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

from rlinf_embodied.flow.calls import owners
from rlinf_embodied.flow.graph import Workflow
from rlinf_embodied.flow.sketch import Sketch
from rlinf_embodied.flow.tree import Devices, Leaf, Shares

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
        self.number = {stage: i for i, stage in enumerate(workflow.stages)}
        ends = ((loop.opener, loop.answerer) for loop in workflow.loops.values())
        self.least = {
            side: max(loop.shards) for loop in workflow.loops.values() for side in (loop.opener, loop.answerer)
        }
        self.pairs = [tuple(self.number[side] for side in pair) for pair in ends]

    def around(self, sketch: Sketch) -> Iterator[Sketch]:
        """Yields sketches in which some stages on unlike devices share their blocks differently."""
        for together in self._together(sketch) if self.unlike else ():
            for devices, shares in self._shares(sketch, together[0]):
                other = sketch.placed(dict.fromkeys(together, devices))
                changes = dict.fromkeys(together, shares)
                yield replace(other, shares=tuple(changes.get(i, own) for i, own in enumerate(other.shares)))

    def mended(self, sketch: Sketch) -> Sketch:
        """Returns a sketch whose shares suit its chunks: those that do not are as even as possible."""
        if not any(sketch.shares):
            return sketch
        units = self._units(sketch)
        kept = (s if not any(n % unit for n in s) else () for s, unit in zip(sketch.shares, units, strict=True))
        return replace(sketch, shares=tuple(kept))

    def _together(self, sketch: Sketch) -> Iterator[tuple[int, ...]]:
        """Yields stages (by number) that may change their shares together: alone, both sides of a loop, all alike."""
        yield from ((i,) for i in range(len(sketch.devices)))
        yield from (pair for pair in self.pairs if sketch.devices[pair[0]] == sketch.devices[pair[1]])
        for devices in dict.fromkeys(sketch.devices):
            alike = tuple(i for i, own in enumerate(sketch.devices) if own == devices)
            if len(alike) > 1:
                yield alike

    def _shares(self, sketch: Sketch, number: int) -> Iterator[tuple[Devices, Shares]]:
        """Yields devices with shares for a stage: its own, with one more, or all of them."""
        stage, own = list(self.work.stages)[number], sketch.devices[number]
        unit, least = self._unit(sketch, number)
        more = (tuple(sorted((*own, device))) for device in self.everywhere if device not in own)
        for devices in dict.fromkeys((own, *more, self.everywhere)):
            shares = self._by_speed(stage, devices, unit, least)
            if shares:
                yield devices, shares
        if not self._are_unlike(own):
            return
        now = list(sketch.shares[number] or self._even(stage, sketch, number))
        for a, b in itertools.permutations(range(len(own)), 2):
            if now[a] - unit >= least * unit:
                yield own, tuple(n + unit * ((i == b) - (i == a)) for i, n in enumerate(now))

    def by_speed(self, sketch: Sketch) -> Sketch:
        """Returns a sketch in which every stage on unlike devices shares its blocks by their speeds."""
        units = (self._unit(sketch, i) for i in range(len(sketch.devices)))
        placed = zip(self.work.stages, sketch.devices, units, strict=True)
        return replace(sketch, shares=tuple(self._by_speed(s, own, *unit) for s, own, unit in placed))

    def _by_speed(self, stage: str, devices: Devices, unit: int, least: int) -> Shares:
        """Returns shares in proportion to a stage's speeds; () where all devices are alike, or blocks too few."""
        speeds = [self.speeds[stage][device] for device in devices]
        if min(speeds) == max(speeds) or min(speeds) <= 0.0:
            return ()
        return tuple(n * unit for n in in_proportion(speeds, self.work.num_blocks // unit, least))

    def _unit(self, sketch: Sketch, number: int) -> tuple[int, int]:
        """Returns the blocks of which a stage's shares are multiples, and how many of them each has at least."""
        unit = self._units(sketch)[number]
        return unit, -(-self.least.get(list(self.work.stages)[number], 1) // unit)

    def _are_unlike(self, devices: Devices) -> bool:
        return len({tuple(speeds[device] for speeds in self.speeds.values()) for device in devices}) > 1

    def _even(self, stage: str, sketch: Sketch, number: int) -> list[int]:
        """Returns how many blocks each device has where they share evenly, in whole units."""
        unit, devices = self._units(sketch)[number], sketch.devices[number]
        found = owners(Leaf(stage, devices), self.work.num_blocks // unit, self.work.num_blocks // unit)
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
