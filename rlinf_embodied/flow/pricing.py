"""Prices of whole plan trees: seconds, memory, and the times of single calls for a simulation; see part_prices.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlinf_embodied.flow import cost
from rlinf_embodied.flow.cost import Price
from rlinf_embodied.flow.graph import Edge, Loop
from rlinf_embodied.flow.part_prices import Counts, PartPrices
from rlinf_embodied.flow.plan import Devices, Leaf, LoopNode, Node, Spatial, Temporal, leaves, nodes


class Pricer(PartPrices):
    """Prices a workflow's plan trees, and what they are made of, on one cluster."""

    # ----------------------------------------------------------------------------------------- for simulations of trees
    def turn_seconds(
        self, loop: Loop, opener: Sequence[int], answerer: Sequence[int], shards: int
    ) -> tuple[float, float, float, float, float]:
        """Returns the seconds of a loop's turn for one shard: opener, answerer, to the latter, back, its last call."""
        a, b = self.counts_of(opener), self.counts_of(answerer)
        e, p = self._turn(loop.opener, a, shards)[0], self._turn(loop.answerer, b, shards)[0]
        up, down = self._wires(loop, a, b, shards) if set(opener) != set(answerer) else (np.zeros(1), np.zeros(1))
        bootstrap = p * self.profile.stages[loop.answerer].bootstrap_fraction
        return float(e[0]), float(p[0]), float(up[0]), float(down[0]), float(bootstrap[0])

    def edge_seconds(self, edge: Edge, source: Sequence[int], target: Sequence[int], chunks: int) -> float:
        """Returns the seconds for one chunk of an edge's data; 0 where it stays in the workers that made it."""
        if set(source) == set(target):
            return 0.0
        items = self.workflow.num_blocks // chunks * self.workflow.items_per_block
        union, lanes = {*source, *target}, min(len(source), len(target))
        num_bytes = self.edge_bytes(edge.source, edge.target) * items
        return float(self._send_s(np.array([num_bytes]), np.array([lanes]), np.array([len(union)]))[0])

    # --------------------------------------------------------------------------------------------------------- memory
    def memory(self, tree: Node) -> dict[int, float]:
        """Returns the most bytes that each device of a plan tree holds at any time of an iteration."""
        stages_on: dict[int, list[str]] = {}
        devices = {leaf.stage: leaf.devices for leaf in leaves(tree)}
        for stage, owned in devices.items():
            for device in owned:
                stages_on.setdefault(device, []).append(stage)
        shards = {leaf.stage: n.shards for n in nodes(tree) if isinstance(n, LoopNode) for leaf in n.stages}
        chunks = self._chunks(tree, 1)
        facts = {s: self._bytes(s, len(d), shards.get(s, 1), chunks[s]) for s, d in devices.items()}
        known = {tuple(stages): self._on_device(tree, facts, set(stages))[1] for stages in stages_on.values()}
        return {device: known[tuple(stages)] for device, stages in stages_on.items()}

    def least_memory(self, tree: Node) -> dict[int, float]:
        """Returns the bytes that each device needs for the largest of its stages while the others are offloaded."""
        shards = {leaf.stage: n.shards for n in nodes(tree) if isinstance(n, LoopNode) for leaf in n.stages}
        chunks, needs, parked = self._chunks(tree, 1), {}, {}
        for leaf in leaves(tree):
            stage = leaf.stage
            _, peak, offloaded = self._bytes(stage, len(leaf.devices), shards.get(stage, 1), chunks[stage])
            for device in leaf.devices:
                needs[device] = max(needs.get(device, 0.0), peak - offloaded)
                parked[device] = parked.get(device, 0.0) + offloaded
        return {device: need + parked[device] for device, need in needs.items()}

    def _chunks(self, node: Node, chunks: int) -> dict[str, int]:
        """Returns in how many chunks each stage of a tree gets its blocks."""
        if isinstance(node, Leaf):
            return {node.stage: chunks}
        if isinstance(node, Spatial) and node.granularity and chunks == 1:
            chunks = self.workflow.num_blocks // node.granularity
        parts = node.stages if isinstance(node, LoopNode) else node.parts
        return {stage: number for part in parts for stage, number in self._chunks(part, chunks).items()}

    def _bytes(self, stage: str, devices: int, shards: int, chunks: int) -> tuple[float, float, float]:
        """Returns a stage's bytes on each of its devices: held, at its peak, offloaded."""
        key = (stage, devices, shards, chunks)
        if key not in self._known_bytes:
            self._known_bytes[key] = self._new_bytes(*key)
        return self._known_bytes[key]

    def _new_bytes(self, stage: str, devices: int, shards: int, chunks: int) -> tuple[float, float, float]:
        measured, work = self.profile.stages[stage], self.workflow
        size = work.num_blocks // chunks
        devices = min(devices, work.most_devices(stage, size))
        items = self._items(stage, chunks, np.array(devices))
        in_chunk, owned = (int(number) // work.items_per_block for number in items)
        at_once = owned if measured.finish_quantiles else in_chunk
        called = -(-at_once // shards) * work.items_per_block
        held = float(measured.resident(owned * work.items_per_block, devices))
        return held, held + float(measured.working(called, devices)), measured.offloaded_bytes

    def _on_device(self, node: Node, facts: dict[str, tuple[float, float, float]], here: set[str]) -> tuple[float, ...]:
        """Returns (held, peak, offloaded) of a node on a device that hosts the stages `here`."""
        if isinstance(node, Leaf):
            return facts[node.stage] if node.stage in here else (0.0, 0.0, 0.0)
        parts = node.stages if isinstance(node, LoopNode) else node.parts
        resident = not isinstance(node, Temporal) or node.resident
        total = (0.0, 0.0, 0.0)
        for part in parts:
            total = _shared(total, self._on_device(part, facts, here), resident)
        return total

    # ---------------------------------------------------------------------------------------------------------- trees
    def price(self, tree: Node) -> Price:
        """Returns the price of a plan tree, as numbers in arrays of length 1; inf where an edge forbids its chunks."""
        return self._price(tree, 1)[0]

    def _price(self, node: Node, chunks: int) -> tuple[Price, int, Devices]:
        if isinstance(node, Leaf):
            return self.leaf(node.stage, self.counts_of(node.devices), chunks), self.bits[node.stage], node.devices
        if isinstance(node, LoopNode):
            return self._price_loop(node, chunks)
        own = (
            1 if not isinstance(node, Spatial) or not node.granularity else self.workflow.num_blocks // node.granularity
        )
        inner = own if chunks == 1 else chunks
        price, mask, devices = self._price(node.parts[0], inner)
        for part in node.parts[1:]:
            b_price, b_mask, b_devices = self._price(part, inner)
            price = self._join(node, inner, (price, mask, devices), (b_price, b_mask, b_devices))
            mask, devices = mask | b_mask, tuple(sorted({*devices, *b_devices}))
        return (cost.collapse(price, inner) if chunks == 1 else price), mask, devices

    def _price_loop(self, node: LoopNode, chunks: int) -> tuple[Price, int, Devices]:
        loop = self.workflow.loops[node.loop]
        sides = {leaf.stage: leaf.devices for leaf in node.stages}
        opener, answerer = sides[loop.opener], sides[loop.answerer]
        union = tuple(sorted({*opener, *answerer}))
        if opener == answerer:
            price = self.loop_collocated(loop, self.counts_of(union), node.shards)
        elif set(opener).isdisjoint(answerer):
            price = self.loop_disaggregated(loop, self.counts_of(opener), self.counts_of(answerer), node.shards)
        else:
            price = self._loop_overlapping(loop, self.counts_of(opener), self.counts_of(answerer), node.shards)
        if chunks > 1:
            price = replace(price, first_s=price.first_s + np.inf)
        return price, self.bits[loop.opener] | self.bits[loop.answerer], union

    def _loop_overlapping(self, loop: Loop, opener: Counts, answerer: Counts, shards: int) -> Price:
        """Returns the price of sides that share some devices: nothing overlaps, as the shared ones serve both."""
        price = self.loop_disaggregated(loop, opener, answerer, shards)
        e, p = (self._turn(s, c, shards)[0] for s, c in ((loop.opener, opener), (loop.answerer, answerer)))
        bootstrap = p * self.profile.stages[loop.answerer].bootstrap_fraction
        seconds = np.maximum(price.first_s, cost.loop_collocated_s(loop.chunk_steps, shards, e, p, bootstrap))
        one = np.ones_like(opener[:, 0])
        bare = self._resident_price(seconds, seconds, [], 0 * one, one, np.ones_like(seconds))
        return replace(
            bare,
            peak_bytes=2 * price.peak_bytes,
            held_bytes=2 * price.held_bytes,
            offloaded_bytes=2 * price.offloaded_bytes,
        )

    def _join(
        self, node: Temporal | Spatial, chunks: int, a: tuple[Price, int, Devices], b: tuple[Price, int, Devices]
    ) -> Price:
        """Returns the price of two neighbouring parts of a node."""
        (a_price, a_mask, a_devices), (b_price, b_mask, b_devices) = a, b
        cut = self.cut(a_mask, b_mask)
        if isinstance(node, Spatial) or set(a_devices).isdisjoint(b_devices):
            price = self.spatial(cut, a_price, b_price, chunks, self.counts_of(a_devices), self.counts_of(b_devices))
            return price if self.streams(a_mask, b_mask, chunks) else replace(price, first_s=price.first_s + np.inf)
        union = tuple(sorted({*a_devices, *b_devices}))
        sides = [
            price if devices == union else replace(price, everywhere=np.zeros_like(price.everywhere))
            for price, devices in ((a_price, a_devices), (b_price, b_devices))
        ]
        by_chunk = self.by_chunk(a_mask, b_mask, chunks)
        return self.temporal(cut, sides[0], sides[1], chunks, self.counts_of(union), by_chunk, node.resident)


def _shared(a: tuple[float, ...], b: tuple[float, ...], resident: bool) -> tuple[float, ...]:
    """Returns (held, peak, offloaded) of two parts that take turns on a device."""
    if not b[1]:
        return a
    if not a[1]:
        return b
    if resident:
        return a[0] + b[0], max(a[1] + b[0], a[0] + b[1]), a[2] + b[2]
    return max(a[0] + b[2], a[2] + b[0]), max(a[1] + b[2], a[2] + b[1]), a[2] + b[2]
