"""What plan trees hold of each device's memory; what their parts cost: part_prices.py, what they take: simulate.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlinf_embodied.planning.part_prices import PartPrices
from rlinf_embodied.planning.plan import Leaf, LoopNode, Node, Plan, Spatial, Temporal, leaves, nodes

Triple = tuple[float, float, float]  # bytes of a stage, or of a part of a plan: held, at its peak, offloaded


class Pricer(PartPrices):
    """Knows a workflow, its profile and a cluster; prices the parts of plans, and counts the bytes of whole ones."""

    def memory(self, tree: Node, staleness: int = 0) -> dict[int, float]:
        """Returns the most bytes that each device of a plan holds at any time of an iteration.

        What is made ahead is counted where it was made, as far as the bytes of the edges are known.
        """
        known: dict[tuple[tuple[str, Triple], ...], float] = {}
        found: dict[int, float] = {}
        for device, facts in self._facts(tree).items():
            key = tuple(facts.items())
            if key not in known:
                known[key] = self._on_device(tree, facts)[1]
            found[device] = known[key]
        for device, num_bytes in self._waiting(tree).items() if staleness else ():
            found[device] += staleness * num_bytes
        return found

    def _waiting(self, tree: Node) -> dict[int, float]:
        """Returns the bytes on each device of one iteration's data that its front has made for its back.

        A stage that several others take data of makes it once: the largest counts.
        """
        work, back, found = self.workflow, self.workflow.back(), dict[int, float]()
        plan = Plan("", self.cluster.num_devices, tree)
        for stage, spec in work.stages.items():
            sizes = [self.edge_bytes(e.source, e.target) for e in work.edges if e.source == stage and e.target in back]
            if stage in back or not any(sizes):
                continue
            for device in plan.owners(stage, work.num_blocks, spec.blocks_per_batch):
                found[device] = found.get(device, 0.0) + max(sizes) * work.items_per_block
        return found

    def least_memory(self, tree: Node) -> dict[int, float]:
        """Returns the bytes that each device needs for the largest of its stages while the others are offloaded."""
        return {
            device: max(peak - offloaded for _, peak, offloaded in facts.values())
            + sum(o for _, _, o in facts.values())
            for device, facts in self._facts(tree).items()
        }

    def _facts(self, tree: Node) -> dict[int, dict[str, Triple]]:
        """Returns for each device of a tree its stages' bytes: held, at their peak, offloaded."""
        shards = {leaf.stage: n.shards for n in nodes(tree) if isinstance(n, LoopNode) for leaf in n.stages}
        chunks, found = self._chunks(tree, 1), dict[int, dict[str, Triple]]()
        for leaf in leaves(tree):
            shares = leaf.shares or (0,) * len(leaf.devices)
            for device, share in zip(leaf.devices, shares, strict=True):
                facts = self._bytes(leaf.stage, len(leaf.devices), shards.get(leaf.stage, 1), chunks[leaf.stage], share)
                found.setdefault(device, {})[leaf.stage] = facts
        return found

    def _chunks(self, node: Node, chunks: int) -> dict[str, int]:
        """Returns in how many chunks each stage of a tree gets its blocks."""
        if isinstance(node, Leaf):
            return {node.stage: chunks}
        if isinstance(node, Spatial) and node.granularity and chunks == 1:
            chunks = self.workflow.num_blocks // node.granularity
        parts = node.stages if isinstance(node, LoopNode) else node.parts
        return {stage: number for part in parts for stage, number in self._chunks(part, chunks).items()}

    def _bytes(self, stage: str, devices: int, shards: int, chunks: int, share: int) -> Triple:
        """Returns a stage's bytes on a device with that share of its blocks; 0: with an even one."""
        key = (stage, devices, shards, chunks, share)
        if key not in self._known_bytes:
            self._known_bytes[key] = self._new_bytes(*key)
        return self._known_bytes[key]

    def _new_bytes(self, stage: str, devices: int, shards: int, chunks: int, share: int) -> Triple:
        measured, work = self.profile.stages[stage], self.workflow
        size = work.num_blocks // chunks
        devices = min(devices, work.most_devices(stage, size))
        items = self._items(stage, chunks, np.array(devices))
        in_chunk, owned = (int(number) // work.items_per_block for number in items)
        if share:
            in_chunk, owned = -(-share // chunks), share
        at_once = owned if measured.finish_quantiles else in_chunk
        called = -(-at_once // shards) * work.items_per_block
        held = float(measured.resident(owned * work.items_per_block, devices))
        return held, held + float(measured.working(called, devices)), measured.offloaded_bytes

    def _on_device(self, node: Node, facts: Mapping[str, Triple]) -> Triple:
        """Returns (held, peak, offloaded) of a node on a device that hosts the stages of `facts`."""
        if isinstance(node, Leaf):
            return facts.get(node.stage, (0.0, 0.0, 0.0))
        parts = node.stages if isinstance(node, LoopNode) else node.parts
        resident = not isinstance(node, Temporal) or node.resident
        total = (0.0, 0.0, 0.0)
        for part in parts:
            total = _shared(total, self._on_device(part, facts), resident)
        return total


def _shared(a: Triple, b: Triple, resident: bool) -> Triple:
    """Returns (held, peak, offloaded) of two parts that take turns on a device."""
    if not b[1]:
        return a
    if not a[1]:
        return b
    if resident:
        return a[0] + b[0], max(a[1] + b[0], a[0] + b[1]), a[2] + b[2]
    return max(a[0] + b[2], a[2] + b[0]), max(a[1] + b[2], a[2] + b[1]), a[2] + b[2]
