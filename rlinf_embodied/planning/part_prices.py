"""Prices of the parts that plans are made of, from a profile: stages, loops, and two parts joined in time or in space.

Devices are given as counts per class (a node group of the cluster), arrays [n, classes], so that one call prices a
stage on many allocations of a cluster.  A number of devices that a stage cannot use has first_s = inf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning import cost
from rlinf_embodied.planning.cost import Price
from rlinf_embodied.planning.profile import Profile, StageProfile, WeightProfile
from rlinf_embodied.workflow.graph import Edge, Loop, Workflow

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Loops = tuple[Loop, ...]  # one, or several that share a stage
Turns = Mapping[str, tuple[Floats, Counts, Counts, Counts]]  # by side: see PartPrices._turn


@dataclass(frozen=True, slots=True)
class Cut:
    """What passes between two sets of stages, the first of which goes first."""

    edges: tuple[Edge, ...]
    weights: tuple[tuple[str, str], ...]  # weight edges with one end on each side
    dependent: bool  # the second waits for the first


class PartPrices:
    """Knows workflow, profile and cluster; all methods are pure (what a search asks for often is remembered)."""

    def __init__(
        self, workflow: Workflow, profile: Profile, cluster: Cluster, *, overlap_in_worker: bool = False
    ) -> None:
        """Checks that the profile covers the workflow.

        Args:
            workflow: the macro graph.
            profile: what its stages cost.
            cluster: what there is to run on.
            overlap_in_worker: whether the two sides of a loop run at once in one worker, where the one works on CPU
                cores and the other is launched to the device asynchronously.

        Raises:
            ConfigError: the profile lacks a stage.
        """
        inside = [side for loop in workflow.loops.values() for side in loop.sides]
        profile.require(workflow.stages, inside)
        self.workflow, self.profile, self.cluster = workflow, profile, cluster
        self.classes = cluster.node_groups()
        self.overlap_in_worker = overlap_in_worker
        self.bits = {stage: 1 << i for i, stage in enumerate(workflow.stages)}
        self.staying = sum(bit for stage, bit in self.bits.items() if profile.stages[stage].stays)
        self._expected_rounds = workflow.expected_rounds() if workflow.repeat else {}
        self._cuts: dict[tuple[int, int], Cut] = {}
        self._leaves: dict[tuple[str, bytes, int], Price] = {}
        self._known_bytes: dict[tuple[str, int, int, int, int], tuple[float, float, float]] = {}
        self._ends = np.array([devices.stop for devices in cluster.group_devices()])
        per_node = Counter[int]()
        for number, group in enumerate(self.classes):
            per_node[number if group.beside is None else group.beside] += group.devices_per_node
        self._devices_per_node = min(per_node.values())
        self._memory = np.array([group.memory_bytes for group in self.classes], dtype=float)

    # -------------------------------------------------------------------------------------------------------- devices
    def counts_of(self, devices: Sequence[int]) -> Counts:
        """Returns how many of the devices belong to each class, as [1, classes]."""
        of_class = np.searchsorted(self._ends, np.asarray(devices), side="right")
        return np.bincount(of_class, minlength=len(self.classes)).astype(np.int64)[None]

    @property
    def capacity_bytes(self) -> float:
        """What the bytes of a price are compared with: the memory of the largest devices.

        Bytes on smaller devices are scaled up accordingly, so that one number says whether a part fits.
        """
        return float(self._memory.max())

    def _scale(self, counts: Counts) -> NDArray[np.float64]:
        """Returns the largest devices' memory over that of the smallest ones in use."""
        smallest = np.where(counts > 0, self._memory, np.inf).min(axis=-1)
        return np.where(np.isfinite(smallest), self.capacity_bytes / smallest, 1.0)

    def _bytes_per_s(self, num_devices: NDArray[np.int64]) -> NDArray[np.float64]:
        links = self.cluster.links
        return np.where(
            num_devices <= self._devices_per_node, links.within_node_bytes_per_s, links.across_nodes_bytes_per_s
        )

    def _send_s(self, block_bytes: cost.Number, blocks: int, lanes: Counts, region: Counts) -> NDArray[np.float64]:
        """Returns the seconds for blocks that `lanes` devices send at once within a region; nothing for no bytes."""
        most = -(-blocks // np.maximum(lanes, 1))  # of one of them
        seconds = block_bytes * most / self._bytes_per_s(region) + self.cluster.links.latency_s
        return np.where(np.asarray(block_bytes) > 0, seconds, 0.0)

    # --------------------------------------------------------------------------------------------------------- stages
    def _slowdown(self, stage: StageProfile, counts: Counts) -> NDArray[np.float64]:
        """Returns the factor of the slowest class in use; inf where a class cannot run the stage."""
        spec = self.workflow.stages[stage.name]
        factors = []
        for group in self.classes:
            factor = stage.kind_factors.get(group.kind, 1.0 if group.kind == self.profile.device_kind else np.inf)
            fits = stage.cores_per_device <= group.cores_per_device and (not spec.kinds or group.kind in spec.kinds)
            factors.append(factor / group.speed if fits else np.inf)
        return np.where(counts > 0, np.array(factors), 0.0).max(axis=-1)

    def slowdown_on(self, stage: str, device: int) -> float:
        """Returns how much longer a stage takes on a device than the profile says; inf where it cannot run."""
        return float(self._slowdown(self.profile.stages[stage], self.counts_of([device]))[0])

    def leaf(self, stage: str, counts: Counts, chunks: int) -> Price:
        """Returns the price of a stage on each allocation; a chunk is spread over all of its devices."""
        key = (stage, counts.tobytes(), chunks)
        if key not in self._leaves:
            self._leaves[key] = self._leaf(stage, counts, chunks)
        return self._leaves[key]

    def _leaf(self, stage: str, counts: Counts, chunks: int) -> Price:
        work, measured = self.workflow, self.profile.stages[stage]
        region = counts.sum(axis=-1)
        size = work.num_blocks // chunks
        # each chunk is spread alike: where it has fewer blocks, the others idle
        devices = np.minimum(region, work.most_devices(stage, size))
        called, owned = self._items(stage, chunks, devices)
        sizes = work.stages[stage].granularities
        allowed = chunks == 1 or not sizes or size in sizes
        slowdown = np.where(allowed & (devices > 0), self._slowdown(measured, counts), np.inf)
        slowdown = slowdown * self._expected_rounds.get(stage, 1.0)
        if measured.finish_quantiles:  # one call; what is finished flows on while the rest goes on
            called = owned
            whole = measured.call_s(owned, devices)
            share = float(measured.finish_share(1.0 / chunks)) if chunks > 1 else 1.0
            first = whole * share * slowdown
            period = whole * max((1.0 - share) / max(chunks - 1, 1), 1e-12) * slowdown
        else:
            first = period = measured.call_s(called, devices) * slowdown
        held = measured.resident(owned, devices)
        bit = np.where(devices == region, self.bits[stage], 0)
        stages = [(measured, held, measured.working(called, devices))]
        return self._resident_price(first, period, stages, bit, devices, self._scale(counts))

    def _items(self, stage: str, chunks: int, devices: Counts) -> tuple[Counts, Counts]:
        """Returns the items per device of a call for one of so many chunks, and of all."""
        work, size = self.workflow, self.workflow.stages[stage].blocks_per_batch
        devices = np.maximum(devices, 1)
        if size == 1:
            called = -(-(work.num_blocks // chunks) // devices) * work.items_per_block
            return called, chunks * called
        owned = -(-(work.num_blocks // size) // devices) * size * work.items_per_block
        return -(-owned // chunks), owned

    def _resident_price(
        self,
        first_s: NDArray[np.float64],
        period_s: NDArray[np.float64],
        stages: Sequence[tuple[StageProfile, NDArray[np.float64], NDArray[np.float64]]],
        everywhere: NDArray[np.int64],
        devices: Counts,
        scale: NDArray[np.float64],
    ) -> Price:
        """Returns the price of stages (profile, held, working bytes) that live on the same devices together."""
        zero = np.zeros_like(first_s)
        held = sum((held for _, held, _ in stages), zero)
        working = zero
        for _, _, extra in stages:
            working = np.maximum(working, extra)
        return Price(
            first_s=first_s,
            period_s=period_s,
            barrier=zero,
            rest_s=zero,
            last_s=zero,
            enter_s=zero + sum(stage.onload_s for stage, _, _ in stages),
            late_s=zero,
            leave_s=zero + sum(stage.offload_s for stage, _, _ in stages),
            wrap_s=zero,
            weights_s=zero,
            held_bytes=held * scale,
            peak_bytes=(held + working) * scale,
            offloaded_bytes=(zero + sum(stage.offloaded_bytes for stage, _, _ in stages)) * scale,
            everywhere=everywhere + np.zeros_like(first_s, dtype=np.int64),
            narrowest=devices,
        )

    # ---------------------------------------------------------------------------------------------------------- loops
    def _turn(self, stage: str, counts: Counts, shards: int) -> tuple[NDArray[np.float64], Counts, Counts, Counts]:
        """Returns seconds per chunk-step of a shard, devices, items owned and items called per device."""
        measured, work = self.profile.stages[stage], self.workflow
        devices = np.minimum(counts.sum(axis=-1), work.num_blocks)
        owned = -(-work.num_blocks // np.maximum(devices, 1))
        called = -(-owned // shards)
        possible = (devices > 0) & (shards <= work.num_blocks // np.maximum(devices, 1))
        slowdown = np.where(possible, self._slowdown(measured, counts), np.inf)
        items, turn = called * work.items_per_block, owned * work.items_per_block
        return measured.call_s(items, devices) * slowdown, devices, turn, items

    def mask_of(self, loops: Loops) -> int:
        """Returns the stages of some loops as a bit mask."""
        return sum(self.bits[side] for side in dict.fromkeys(side for loop in loops for side in loop.sides))

    def halves(self, loops: Loops) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the openers of some loops, and the other stages: what their disaggregated form has apart."""
        first = tuple(dict.fromkeys(loop.opener for loop in loops))
        return first, tuple(s for s in dict.fromkeys(s for loop in loops for s in loop.sides) if s not in first)

    def loop_collocated(self, loops: Loops, counts: Counts, shards: int = 1) -> Price:
        """Returns the price of a loop whose sides live in the same workers; of several that share one, of them all."""
        turns = {side: self._turn(side, counts, shards) for half in self.halves(loops) for side in half}
        seconds, possible = np.zeros(len(counts)), np.full(len(counts), True)
        for loop in loops:
            e, p, both = _finite(turns[loop.opener][0], turns[loop.answerer][0])
            bootstrap = _share(_finite(e, turns[loop.answerer][0])[1], self._bootstrap(loop))
            if self.overlap_in_worker and shards > 1:
                one = cost.loop_disaggregated_s(loop.chunk_steps, shards, e, p, 0.0, 0.0, bootstrap)
            else:
                one = cost.loop_collocated_s(loop.chunk_steps, shards, e, p, bootstrap)
            seconds, possible = seconds + one * loop.expected_rounds, possible & both
        seconds = np.where(possible, seconds, np.inf)
        profiles = self.profile.stages
        parts = [
            (profiles[side], profiles[side].resident(owned, devices), profiles[side].working(called, devices))
            for side, (_, devices, owned, called) in turns.items()
        ]
        region, devices = counts.sum(axis=-1), turns[loops[0].opener][1]
        bits = np.where(devices == region, self.mask_of(loops), 0)
        return self._resident_price(seconds, seconds, parts, bits, devices, self._scale(counts))

    def loop_disaggregated(self, loops: Loops, opener_counts: Counts, answerer_counts: Counts, shards: int) -> Price:
        """Returns the price of a loop whose opener owns devices apart from those of its other sides.

        Several loops that share a stage are one after the other, all openers in the one place.
        """
        counts = (opener_counts, answerer_counts)
        halves = self.halves(loops)
        turns = [
            {side: self._turn(side, own, shards) for side in half} for half, own in zip(halves, counts, strict=True)
        ]
        together = turns[0] | turns[1]
        region = opener_counts.sum(axis=-1) + answerer_counts.sum(axis=-1)
        seconds, possible = np.zeros(len(region)), np.full(len(region), bool(turns[1]))
        for loop in loops:
            e, p, both = _finite(together[loop.opener][0], together[loop.answerer][0])
            up, down = self._wires(loop, opener_counts, answerer_counts, shards)
            bootstrap = _share(_finite(e, together[loop.answerer][0])[1], self._bootstrap(loop))
            one = cost.loop_disaggregated_s(loop.chunk_steps, shards, e, p, up, down, bootstrap)
            seconds, possible = seconds + one * loop.expected_rounds, possible & both
        seconds = np.where(possible, seconds, np.inf)
        none = np.zeros_like(region)
        sides = [self._half_price(half, own, seconds, none) for half, own in zip(turns, counts, strict=True) if half]
        if len(sides) == 1:
            return sides[0]
        return replace(cost.side_by_side(sides[0], sides[1], 1, 0.0), first_s=seconds, period_s=seconds)

    def _half_price(self, turns: Turns, counts: Counts, seconds: Floats, none: Counts) -> Price:
        known = self.profile.stages
        parts = [
            (known[s], known[s].resident(own, n), known[s].working(call, n)) for s, (_, n, own, call) in turns.items()
        ]
        devices = next(iter(turns.values()))[1]
        return self._resident_price(seconds, seconds, parts, none, devices, self._scale(counts))

    def _bootstrap(self, loop: Loop) -> float:
        return self.profile.stages[loop.answerer].bootstrap_fraction

    def _wires(self, loop: Loop, opener: Counts, answerer: Counts, shards: int) -> tuple[cost.Array, cost.Array]:
        """Returns the seconds that a shard's message needs to the answerer, and back."""
        a, b = opener.sum(axis=-1), answerer.sum(axis=-1)
        lanes = np.minimum(np.minimum(a, b), self.workflow.num_blocks)
        blocks, items = -(-self.workflow.num_blocks // shards), self.workflow.items_per_block
        shown = self.edge_bytes(loop.opener, loop.answerer)
        told = self.edge_bytes(loop.answerer, loop.opener)
        up, down = (self._send_s(size * items, blocks, lanes, a + b) for size in (shown, told))
        return up, down

    def edge_bytes(self, source: str, target: str) -> float:
        """Returns the bytes per item that `target` gets from `source`: as measured, else as the workflow estimates."""
        known = self.profile.edge_bytes_per_item.get((source, target))
        if known is None:
            declared = (e.bytes_per_item for e in self.workflow.edges if (e.source, e.target) == (source, target))
            known = next(declared, 0.0)
        return known * self._expected_rounds.get(source, 1.0)

    # ----------------------------------------------------------------------------------------------------------- cuts
    def cut(self, first: int, second: int) -> Cut:
        """Returns what passes between two sets of stages (bit masks)."""
        if (first, second) not in self._cuts:
            self._cuts[first, second] = self._cut(first, second)
        return self._cuts[first, second]

    def _cut(self, first: int, second: int) -> Cut:
        edges = tuple(e for e in self.workflow.edges if self.bits[e.source] & first and self.bits[e.target] & second)
        either = first | second
        weights = tuple(
            (e.source, e.target)
            for e in self.workflow.weight_edges
            if (self.bits[e.source] | self.bits[e.target]) & either == self.bits[e.source] | self.bits[e.target]
            and bool(self.bits[e.source] & first) != bool(self.bits[e.target] & first)
        )
        return Cut(edges, weights, bool(edges))

    def streams(self, first: int, second: int, chunks: int) -> bool:
        """Returns whether all that passes between two sets of stages may do so chunk by chunk."""
        size = self.workflow.num_blocks // chunks
        return chunks == 1 or all(edge.allows(size, self.workflow.num_blocks) for edge in self.cut(first, second).edges)

    def chunk_counts(self) -> tuple[int, ...]:
        """Returns the numbers of chunks that some edge allows, 1 first."""
        blocks = self.workflow.num_blocks
        divisors = [k for k in range(2, min(blocks, 64) + 1) if blocks % k == 0]
        edges = self.workflow.edges
        return (1, *(k for k in divisors if any(edge.allows(blocks // k, blocks) for edge in edges)))

    def spatial(self, cut: Cut, a: Price, b: Price, chunks: int, a_counts: Counts, b_counts: Counts) -> Price:
        """Returns the price of two parts on disjoint devices."""
        a_devices, b_devices = a_counts.sum(axis=-1), b_counts.sum(axis=-1)
        region = a_devices + b_devices
        weights = sum((self._weights_s(edge, region) for edge in cut.weights), np.zeros_like(region, dtype=float))
        if not cut.dependent:
            return cost.side_by_side(a, b, chunks, weights)
        bytes_per_item = sum(self.edge_bytes(edge.source, edge.target) for edge in cut.edges)
        sent_s = self._sent_s(bytes_per_item, a, b, chunks, region)
        return cost.pipeline(a, b, chunks, sent_s, weights)

    def _sent_s(self, bytes_per_item: cost.Number, a: Price, b: Price, chunks: int, region: Counts) -> Floats:
        """Returns the seconds that a chunk of these bytes needs from a to b."""
        blocks, lanes = self.workflow.num_blocks // chunks, np.minimum(a.narrowest, b.narrowest)
        return self._send_s(bytes_per_item * self.workflow.items_per_block, blocks, lanes, region)

    def temporal(
        self, cut: Cut, a: Price, b: Price, chunks: int, counts: Counts, by_chunk: bool, resident: bool
    ) -> Price:
        """Returns the price of two parts that take turns on the same devices.

        What both sides do on every device stays in its process; the rest moves.
        """
        region = counts.sum(axis=-1)
        a_mask, b_mask = np.asarray(a.everywhere), np.asarray(b.everywhere)
        moved = np.zeros_like(a.first_s + b.first_s)
        for edge in cut.edges:
            stays = (a_mask & self.bits[edge.source] > 0) & (b_mask & self.bits[edge.target] > 0)
            moved = moved + np.where(stays, 0.0, self.edge_bytes(edge.source, edge.target))
        weights = np.zeros_like(moved)
        for edge in cut.weights:
            shared = (a_mask | b_mask) & self.bits[edge[0]] > 0
            weights = weights + np.where(shared, 0.0, self._weights_s(edge, region))
        move = self._sent_s(moved, a, b, chunks, region)
        if not resident:
            return cost.switching(a, b, chunks, move, weights)
        turn = np.where(by_chunk & (a.barrier + b.barrier == 0), 1.0, 0.0)
        return cost.temporal(a, b, chunks, move, weights, turn)

    def _weights_s(self, edge: tuple[str, str], region: Counts) -> NDArray[np.float64]:
        measured = self.profile.weights.get(edge, WeightProfile(0.0))
        return self._send_s(measured.bytes, 1, np.ones_like(region), region) + measured.export_s + measured.install_s

    def by_chunk(self, first: int, second: int, chunks: int) -> bool:
        """Returns whether two sets of stages on the same devices may alternate chunk by chunk."""
        long_tailed = any(
            self.profile.stages[stage].finish_quantiles for stage, bit in self.bits.items() if bit & (first | second)
        )
        return chunks == 1 or (self.streams(first, second, chunks) and not long_tailed)


def _finite(e: NDArray[np.float64], p: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray]:
    """Returns both sides of a loop with 0 in the place of inf, and where both are possible."""
    possible = np.isfinite(e) & np.isfinite(p)
    return np.where(possible, e, 0.0), np.where(possible, p, 0.0), possible


def _share(seconds: NDArray[np.float64], fraction: float) -> NDArray[np.float64]:
    """Returns a fraction of seconds, none of infinitely many included."""
    return seconds * fraction if fraction else np.zeros_like(seconds)
