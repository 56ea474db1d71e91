"""Random workflows of fake stages, and random plans that a cluster allows for them.

What a fake computes depends on the identity, number and order of its inputs, on the iteration and on the weights; so
an executor that loses, doubles or swaps anything, or calls too early, gives other numbers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Item, Place, Plan, collocated, in_order, sorted_pairs, with_lent
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

ITERATIONS = 2  # the second one shows whether the weights arrived

PRIME = 1_000_003


def mixed(*parts: int) -> int:
    """A number that depends on the values and order of its parts."""
    value = 17
    for part in parts:
        value = (value * 31 + part + 7) % PRIME
    return value


class Fake:
    """Any stage: a leaf, a side of a loop, a collective that meets at its last chunk, source or target of weights."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.name, self.number = str(config["name"]), int(str(config["number"]))
        self.collective, self.together = bool(config.get("collective")), int(str(config.get("together", 1)))
        self.ends = list(config.get("ends", ()))  # of the weight edge  # pyright: ignore[reportArgumentType]

    def setup(self, context: StageContext) -> None:
        self.context, self.offloaded = context, False
        sets = [context.owners[i : i + self.together] for i in range(0, context.num_blocks, self.together)]
        assert all(len(set(owners)) == 1 for owners in sets), "a set of blocks is torn apart"
        shared = context.share("weights", lambda: [0])  # both ends in one worker use the same
        self.weights = shared if self.name in self.ends and isinstance(shared, list) else [0]
        self.weights[0] = 0  # the worker may have run another workflow
        self.waiting: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def offload(self, step_context: StepContext) -> None:
        assert not self.offloaded
        self.offloaded = True

    def onload(self, step_context: StepContext) -> None:
        assert self.offloaded
        self.offloaded = False

    def _value(self, step_context: StepContext, block: int, *parts: int) -> int:
        assert not self.offloaded, "a offloaded stage was called"
        message = step_context.message if isinstance(step_context.message, int) else 0
        return mixed(self.number, block, step_context.iteration, message, self.weights[0], *parts)

    def run(self, step_context: StepContext, inputs: Mapping[int, Sequence[int]]) -> Output:
        results = {
            block: self._value(step_context, block, step_context.round, *parts) for block, parts in inputs.items()
        }
        if self.collective:
            assert not results.keys() & self.waiting.keys()
            self.waiting |= results
            if step_context.chunk == step_context.num_chunks - 1:
                self._meet()
        return Output(results, dict(results))

    def _meet(self) -> None:
        """Sums over all blocks, in the order of the blocks, and makes that the weight."""
        own = [block for block, owner in enumerate(self.context.owners) if owner == self.context.group.rank]
        assert sorted(self.waiting) == own, f"{self.waiting} at the last chunk, but {own} are owned"
        counts = [self.context.owners.count(rank) for rank in range(self.context.group.size)]
        met = self.context.group.exchange([torch.tensor([self.waiting[b]]) for b in own], counts)
        if self.ends[:1] == [self.name]:
            self.weights[0] = mixed(self.number, sum(int(value) for values in met for value in values))
        self.waiting = {}

    def open(self, step_context: StepContext, blocks: Sequence[int] | Mapping[int, Sequence[int]]) -> dict[int, int]:
        given = blocks if isinstance(blocks, Mapping) else dict.fromkeys(blocks, ())
        self.seen |= {
            block: self._value(step_context, block, step_context.round, *parts) for block, parts in given.items()
        }
        return {block: self.seen[block] for block in blocks}

    def step(self, step_context: StepContext, messages: Mapping[int, int]) -> dict[int, int]:
        for block, message in messages.items():
            seen = self.seen.get(block, 0)
            self.seen[block] = self._value(step_context, block, seen, step_context.chunk_step, message)
        return {block: self.seen[block] for block in messages}

    def close(self, step_context: StepContext, messages: Mapping[int, int | None]) -> Output:
        results = {
            b: self._value(step_context, b, self.seen.pop(b, 0), message or 0) for b, message in messages.items()
        }
        return Output(results, dict(results))

    def export_weights(self, step_context: StepContext) -> int:
        assert not self.offloaded
        return self.weights[0]

    def install_weights(self, step_context: StepContext, weight: int) -> None:
        assert not self.offloaded
        self.weights[0] = weight


def fake(
    name: str, number: int, collective: bool = False, ends: Sequence[str] = (), at_once: bool = False
) -> StageSpec:
    """Returns a stage that is a Fake."""
    config = {"name": name, "number": number, "collective": collective, "ends": ends}
    return StageSpec(name, "any_plan.Fake", config, collective=collective, at_once=at_once)


def rollouts() -> Workflow:
    """Returns a loop of env and policy, three chunk-steps long, and an actor that learns from both."""
    ends = ("actor", "policy")
    stages = {name: fake(name, number, name == "actor", ends) for number, name in enumerate(("env", "policy", "actor"))}
    edges = (Edge("policy", "actor"), Edge("env", "actor"))
    return Workflow("fake", 4, stages, edges, (WeightEdge(*ends),), {"rollout": Loop("rollout", "env", "policy", 3)})


def with_several_devices(workflow: Workflow, draw: random.Random) -> Workflow:
    """Workers of about half of the stages have two devices."""
    stages = {n: replace(s, devices_per_worker=draw.choice((1, 2))) for n, s in workflow.stages.items()}
    return replace(workflow, stages=stages)


def decide(rounds: Sequence[Sequence[object]]) -> RepeatDecision:
    """Stops at a round that depends on the data."""
    values = [value for reports in rounds for report in reports for value in dict(report).values()]  # pyright: ignore
    return RepeatDecision(sum(values) % 3 != 0, sum(values))


def random_workflow(seed: int) -> Workflow:
    """Chains, diamonds, several sources and sinks, weight edges, loops and data-dependent repeats."""
    draw = random.Random(seed)
    with_loop = seed % 2 == 0
    names = [f"s{i}" for i in range(draw.randint(1, 2) if with_loop else draw.randint(2, 3) + (seed % 15 == 5))]
    blocks = draw.choice([3, 4] if len(names) > 2 else [3, 4, 6])
    pairs = [(a, b) for a, b in itertools.combinations(names, 2) if draw.random() < 0.6]
    collective = {name for name in names if draw.random() < 0.4}
    loops, everyone = {}, list(names)
    if with_loop:
        everyone += ["env", "policy"]
        pairs += [(end, names[0]) for end in ("policy", "env") if draw.random() < 0.8]
        loops = {"l": Loop("l", "env", "policy", draw.randint(1, 3))}
    edges = tuple(Edge(a, b, whole=draw.choice([False, False, True])) for a, b in pairs)
    learns = _weight_edge(draw, collective, pairs)
    stages = {name: fake(name, i, name in collective, learns, draw.random() < 0.2) for i, name in enumerate(everyone)}
    weights = (WeightEdge(*learns),) if learns else ()
    workflow = Workflow(f"random {seed}", blocks, stages, edges, weights, loops)
    return _repeated(draw, _in_sets(draw, workflow))


def _in_sets(draw: random.Random, workflow: Workflow) -> Workflow:
    """Some stages work on several blocks together."""
    stages, inside = {}, {side for loop in workflow.loops.values() for side in loop.sides}
    for name, spec in workflow.stages.items():
        free = not spec.collective and name not in inside
        sizes = [k for k in (2, 3) if workflow.num_blocks % k == 0]
        together = draw.choice(sizes) if free and sizes and draw.random() < 0.3 else 1
        config = {**spec.config, "together": together}  # pyright: ignore[reportGeneralTypeIssues]
        stages[name] = replace(spec, config=config, blocks_per_batch=together)
    return replace(workflow, stages=stages)


def _repeated(draw: random.Random, workflow: Workflow) -> Workflow:
    """Some workflows do all that comes before a stage again until the data are enough."""
    silent = {loop.answerer for loop in workflow.loops.values()}
    for before in workflow.stages if draw.random() < 0.7 else ():
        whole = replace(workflow.stages[before], whole=True)
        try:
            return replace(
                workflow,
                stages={**workflow.stages, before: whole},
                repeat=Repeat("r", before, sorted(workflow.upstream(before) - silent)[-1], decide, 3),
            )
        except (PlanError, IndexError):
            continue
    return workflow


def _weight_edge(draw: random.Random, collective: set[str], pairs: list[tuple[str, str]]) -> tuple[str, ...]:
    """From a stage to one that its data comes from: new weights are for the next iteration."""
    ends = [(b, a) for a, b in pairs if b in collective and a != "env"]
    return draw.choice(ends) if ends else ()


# ---------------------------------------------------------------------------------------------------------- any plan
def any_plans(workflow: Workflow, num_devices: int, seed: int, number: int = 40) -> list[Plan]:
    """Returns different random plans that can run: any order, devices, blocks, chunks, shards, and exclusive pairs."""
    draw, found = random.Random(seed), {}
    for _ in range(20 * number):
        plan = random_plan(workflow, num_devices, draw)
        if plan is not None and len(found) < number:
            found[to_text(plan)] = plan
    return list(found.values())


def random_plan(workflow: Workflow, num_devices: int, draw: random.Random, staleness: int = 0) -> Plan | None:
    """Returns a random plan, None if what was drawn cannot run."""
    units, items = _random_order(workflow, draw), []
    exact = draw.random() < 0.5  # loops with the same blocks on the same devices
    while units:
        size = 1 if len(units[0]) > 1 else draw.choice([1, 1, 2, 3])
        stages = [stage for unit in units[:size] for stage in unit]
        loop = len(units[0]) > 1
        chunks = draw.choice([k for k in range(1, workflow.num_blocks + 1) if workflow.num_blocks % k == 0])
        chunks = chunks if len(stages) > 1 and not loop else 1
        places = [_random_place(workflow, stage, num_devices, chunks, draw) for stage in stages]
        if loop and exact:
            places = [replace(places[0], stage=stage) for stage in stages]
        if loop or chunks > 1:
            items.append(Item(tuple(places), chunks, draw.choice([1, 2]) if loop else 1))
        else:
            items += [Item((place,)) for place in places]
        units = units[size:]
    share = draw.choice([0.0, 0.0, 0.5])
    pairs = [pair for pair in itertools.combinations(workflow.stages, 2) if draw.random() < share]
    plan = Plan("random", num_devices, tuple(items), sorted_pairs(pairs), staleness)
    try:
        check(plan, workflow)
    except PlanError:
        return None
    return plan


def _random_order(workflow: Workflow, draw: random.Random) -> list[tuple[str, ...]]:
    """Returns stages and loops in a random order along the edges."""
    items = in_order(workflow, {stage: Place(stage, (0,)) for stage in workflow.stages})
    left, done, found = [item.stages for item in items], set(), []
    while left:
        ready = [unit for unit in left if all(set(workflow.sources(stage)) <= done | set(unit) for stage in unit)]
        unit = draw.choice(ready)
        left.remove(unit)
        done |= set(unit)
        found.append(unit)
    return found


def _random_place(workflow: Workflow, stage: str, num_devices: int, chunks: int, draw: random.Random) -> Place:
    place = _random_workers(workflow, stage, num_devices // workflow.stages[stage].devices_per_worker, chunks, draw)
    each = workflow.stages[stage].devices_per_worker
    return replace(place, devices=with_lent([each * worker for worker in place.devices], each))


def _random_workers(workflow: Workflow, stage: str, num_devices: int, chunks: int, draw: random.Random) -> Place:
    batch = workflow.stages[stage].blocks_per_batch
    unit = batch if batch > 1 else chunks
    units = workflow.num_blocks // unit
    devices = tuple(sorted(draw.sample(range(num_devices), draw.randint(1, min(num_devices, units)))))
    if draw.random() < 0.5 or len(devices) == 1:
        return Place(stage, devices)
    ends = sorted(draw.sample(range(1, units), len(devices) - 1))
    return Place(stage, devices, tuple((b - a) * unit for a, b in itertools.pairwise([0, *ends, units])))


def features(plan: Plan) -> set[str]:
    """Returns what a plan exercises, for a sample that covers all of it."""
    found = {f"{len(place.devices)} devices" for place in plan.places().values()}
    found |= {"chunks"} if any(item.chunks > 1 for item in plan.items) else set()
    found |= {"shards"} if any(item.shards > 1 for item in plan.items) else set()
    found |= {"blocks"} if any(place.blocks for place in plan.places().values()) else set()
    return found | ({"exclusive"} if plan.exclusive else set())


# ------------------------------------------------------------------------------------------------------------ running
def outcome(
    workflow: Workflow, plan: Plan, session: Session, iterations: int = ITERATIONS
) -> list[dict[str, dict[int, int]]]:
    """What every stage reported for every block, by iteration; of a loop's sides the opener speaks."""
    cluster = Cluster("test", "cpu", plan.num_devices, plan.num_devices, 0)
    executor = Executor(workflow, plan, session, cluster)
    return [by_block(workflow, executor.run(StepContext(number))) for number in range(iterations)]


def by_block(workflow: Workflow, result: IterationResult) -> dict[str, dict[int, int]]:
    """Returns an iteration's reports by stage and block."""
    silent = {side for loop in workflow.loops.values() for side in loop.sides[1:]}
    merged: dict[str, dict[int, int]] = {}
    for stage, rounds in ((s, r) for s, r in result.reports.items() if s not in silent and "." not in s):
        merged[f"{stage} rounds"] = {0: len(rounds) if workflow.loops or workflow.repeat else 1}
        merged[stage] = {b: v for answers in rounds for a in answers if isinstance(a, dict) for b, v in a.items()}
    return merged


def alone(workflow: Workflow) -> list[dict[str, dict[int, int]]]:
    """The same by one device, one stage after the other."""
    return outcome(workflow, collocated(workflow, 1), SerialSession())
