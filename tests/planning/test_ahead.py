"""Rollouts that run ahead: what an iteration takes, held against an event simulation that shares no code with it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import any_plan
import plan_cases as planning
import pytest
from plan_cases import parse

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.drift import replan
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import Item, Place, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

DEVICES, EXPORT_S, INSTALL_S = 3, 0.25, 0.5


# ----------------------------------------------------------------------------------------------------------- the oracle
@dataclass(eq=False)
class Job:
    """A call: a worker is busy with it for some seconds once what it needs is there, together with its peers."""

    worker: int
    seconds: float
    needs: list[Job]
    peers: list[Job] = field(default_factory=list)
    end: float | None = None


class Machine:
    """Workers with a queue each, and a clock that goes from event to event."""

    def __init__(self) -> None:
        self.now, self.queues, self.busy, self.events = 0.0, {w: [] for w in range(DEVICES)}, set(), []
        self.number = itertools.count()

    def submit(self, jobs: list[Job]) -> list[Job]:
        for job in jobs:
            self.queues[job.worker].append(job)
        return jobs

    def _ready(self, job: Job) -> bool:
        first = self.queues[job.worker][:1] == [job] and job.worker not in self.busy
        return first and all(need.end is not None for need in job.needs)

    def _start(self) -> bool:
        for queue in self.queues.values():
            together = queue[0].peers or [queue[0]] if queue else []
            if together and all(self._ready(job) for job in together):
                seconds = max(job.seconds for job in together)
                for job in together:
                    self.queues[job.worker].pop(0)
                    self.busy.add(job.worker)
                    heapq.heappush(self.events, (self.now + seconds, next(self.number), job))
                return True
        return False

    def wait(self, jobs: list[Job]) -> float:
        """Lets time go on until these are done."""
        while any(job.end is None for job in jobs):
            while self._start():
                pass
            self.now, _, job = heapq.heappop(self.events)
            job.end = self.now
            self.busy.discard(job.worker)
        return self.now


class Oracle:
    """Runs a plan of leaves, chunked groups and loops on a Machine, without bytes and switches."""

    def __init__(self, work: Workflow, times: dict[str, tuple[float, float]], parts: Sequence[Item]) -> None:
        self.work, self.times, self.parts, self.machine = work, times, parts, Machine()
        weights = work.weight_edges[0]
        reached = {weights.source} | {name for name, spec in work.stages.items() if spec.collective}
        for _ in work.stages:
            reached |= {edge.target for edge in work.edges if edge.source in reached}
        self.back_stages, self.weights = reached, weights
        self.hosts = {leaf.stage: set(self._owners(leaf, work.num_blocks)) for leaf in self._leaves()}

    def _leaves(self) -> list[Place]:
        return [place for part in self.parts for place in part.places]

    def _owners(self, leaf: Place, chunk: int) -> list[int]:
        number = len(leaf.devices)
        return [leaf.devices[(block % chunk) * number // chunk] for block in range(self.work.num_blocks)]

    def _jobs(
        self, stage: str, owners: list[int], blocks: list[int], needs, made: dict, scale: float = 1.0
    ) -> list[Job]:
        base, each = self.times[stage]
        jobs = []
        for worker in sorted({owners[b] for b in blocks}):
            own = [b for b in blocks if owners[b] == worker]
            jobs.append(Job(worker, scale * (base + each * len(own)), [n for b in own for n in needs(b)]))
            made |= {(stage, b): jobs[-1] for b in own}
        if self.work.stages[stage].collective:
            for job in jobs:
                job.peers = jobs
        return self.machine.submit(jobs)

    def _leaf(self, leaf: Place, size: int, chunk: int, made: dict) -> list[Job]:
        blocks = list(range(chunk * size, (chunk + 1) * size))
        sources = [edge.source for edge in self.work.edges if edge.target == leaf.stage]
        before = dict(made)
        return self._jobs(leaf.stage, self._owners(leaf, size), blocks, lambda b: [before[s, b] for s in sources], made)

    def _loop(self, node: Item, made: dict) -> list[Job]:
        (loop,), blocks = self.work.loops.values(), self.work.num_blocks
        a, b = ({leaf.stage: leaf for leaf in node.places}[stage] for stage in (loop.opener, loop.answerer))
        sides = {leaf.stage: self._owners(leaf, blocks) for leaf in (a, b)}
        sources = [e.source for e in self.work.edges if e.target == a.stage and e.source != b.stage]
        given = {block: [made[s, block] for s in sources] for block in range(blocks)}
        shards = [[x for x in range(blocks) if x % node.shards == k] for k in range(node.shards)]
        if sides[a.stage] == sides[b.stage]:  # one call per worker
            jobs = []
            for worker in sorted(set(sides[a.stage])):
                own = [x for x in range(blocks) if sides[a.stage][x] == worker]
                each = sum(self.times[s][0] + self.times[s][1] * len(own) for s in (a.stage, b.stage))
                jobs.append(Job(worker, loop.chunk_steps * each, [n for x in own for n in given[x]]))
                made |= {(stage, x): jobs[-1] for x in own for stage in (a.stage, b.stage)}
            return self.machine.submit(jobs)
        done = []
        for shard in shards:
            done += self._jobs(a.stage, sides[a.stage], shard, lambda x: given[x], made, 0.0)
        for _ in range(loop.chunk_steps):
            for shard, (me, other) in itertools.product(shards, ((b, a), (a, b))):
                shown = dict(made)
                done += self._jobs(me.stage, sides[me.stage], shard, lambda x, o=other, m=shown: [m[o.stage, x]], made)
        for shard in shards:  # the last values, and the end
            shown = dict(made)
            done += self._jobs(b.stage, sides[b.stage], shard, lambda x, m=shown: [m[a.stage, x]], made, 0.0)
            done += self._jobs(a.stage, sides[a.stage], shard, lambda x: [], made, 0.0)
        return done

    def _submit(self, stages: set[str], made: dict) -> list[Job]:
        jobs = []
        for part in self.parts:
            if "env" in part.stages:
                jobs += self._loop(part, made) if "env" in stages else []
                continue
            size = self.work.num_blocks // part.chunks
            for chunk in range(part.chunks):
                for place in part.places:
                    jobs += self._leaf(place, size, chunk, made) if place.stage in stages else []
        return jobs

    def _weights(self) -> list[Job]:
        targets = sorted(self.hosts[self.weights.target] - self.hosts[self.weights.source])
        if not targets:
            return []
        export = Job(min(self.hosts[self.weights.source]), EXPORT_S, [])
        return self.machine.submit([export, *(Job(w, INSTALL_S, [export]) for w in targets)])

    def seconds(self, staleness: int, runs: int = 40, last: int = 24) -> float:
        """Seconds per run of the last ones."""
        front_stages = set(self.work.stages) - self.back_stages
        used = [{w for stage in stages for w in self.hosts[stage]} for stages in (front_stages, self.back_stages)]
        shared, ahead, ends = bool(used[0] & used[1]), [], [0.0]

        def front() -> None:
            made: dict = {}
            ahead.append((made, self._submit(front_stages, made)))

        for number in range(runs):
            for _ in range(staleness if number == 0 else 0):
                front()
            if shared:
                front()
            made, jobs = ahead.pop(0)
            jobs = jobs + self._submit(self.back_stages, made)
            if not shared:
                front()
            ends.append(self.machine.wait(jobs + self._weights()))
        return (ends[-1] - ends[-1 - last]) / last


# ------------------------------------------------------------------------------------------------------------ the cases
def random_plan(seed: int) -> tuple[Pricer, Oracle, Plan]:
    """A workflow with weights for a stage in front, and a plan that puts its stages anywhere on three devices."""
    draw = random.Random(seed)
    names = [f"s{i}" for i in range(draw.randint(2, 4))]
    edges = [(names[draw.randrange(i)], names[i]) for i in range(1, len(names))]
    source = draw.choice(names[1:])
    target = draw.choice([a for a, b in edges if b == source])
    loops, blocks, first = {}, draw.choice([4, 6]), []
    if draw.random() < 0.5:
        loops = {"l": Loop("l", "env", "policy", draw.randint(1, 3))}
        edges += [("policy", names[0]), ("env", names[0])]
        first, target = ["env", "policy"], draw.choice(["policy", target])
    collective = {name for name in names if draw.random() < 0.3}
    specs = {n: StageSpec(n, "fake", None, collective=n in collective) for n in (*first, *names)}
    flowing = tuple(Edge(a, b, whole=a in first) for a, b in edges)
    work = Workflow("ahead", blocks, specs, flowing, (WeightEdge(source, target),), loops)
    times = {name: (draw.choice([0.0, 0.5, 2.0]), draw.choice([0.25, 1.0, 1.5])) for name in specs}
    entries = {name: planning.stage(*numbers, loop=name in first) for name, numbers in times.items()}
    weights = {f"{source}->{target}": {"bytes": 0.0, "export_s": EXPORT_S, "install_s": INSTALL_S}}
    pricer = Pricer(work, planning.profile(entries, weights=weights), planning.cluster(DEVICES))
    while (plan := any_plan.random_plan(work, DEVICES, draw)) is None:
        pass
    items = tuple(replace(i, places=tuple(replace(p, blocks=()) for p in i.places)) for i in plan.items)
    return pricer, Oracle(work, times, items), replace(plan, items=items, exclusive=())


def seconds_of(plan: Plan, pricer: Pricer, staleness: int = 0) -> float:
    return simulate(replace(plan, staleness=staleness), pricer).iteration_s


@pytest.mark.parametrize("seed", range(40))
def test_the_simulation_says_what_an_event_simulation_says(seed: int) -> None:
    for staleness in (1, 2, 3):
        pricer, oracle, plan = random_plan(seed)
        assert seconds_of(plan, pricer, staleness) == pytest.approx(oracle.seconds(staleness)), staleness


def test_fresh_weights_are_simulated_by_the_same_oracle() -> None:
    """With nothing ahead, runs of the oracle are barriers, like iterations."""
    for seed in range(20):
        pricer, oracle, plan = random_plan(seed)
        ends = [0.0]
        for _ in range(3):
            jobs = oracle._submit(set(oracle.work.stages), {})
            ends.append(oracle.machine.wait(jobs + oracle._weights()))
        assert ends[-1] - ends[-2] == pytest.approx(seconds_of(plan, pricer))


# ----------------------------------------------------------------------------------------------- prices with arithmetic
def halves() -> tuple[Pricer, Plan]:
    """Four devices.  Rollout on two of them: 8 blocks, 4 steps of 1 s per block and side: 4 * (4 + 4) = 32 s.

    Actor on the other two: 12 s per block: 48 s.
    """
    work, measured = planning.embodied((0, 1), (0, 1), (0, 12))
    return Pricer(work, measured, planning.cluster(4)), parse("env+policy on 0-1 > actor on 2-3", 4, work)


def test_apart_front_and_back_take_as_long_as_the_slower_of_them() -> None:
    pricer, plan = halves()
    assert [seconds_of(plan, pricer, k) for k in (0, 1, 2)] == pytest.approx([80.0, 48.0, 48.0])
    run = simulate(replace(plan, staleness=1), pricer, traced=True)
    assert run.idle_share(0) == pytest.approx(1 - 32 / 48)
    assert {(s.stage, s.start_s, s.end_s) for s in run.spans} >= {("actor", 0.0, 48.0)}


def test_a_stage_between_that_takes_no_weights_gains_by_a_second_iteration(few_moves) -> None:
    """Generation, reward and actor of 10 s on a device each.

    Fresh: 30 s.  One ahead: generation i + 1 and then reward i + 1 go beside actor i, but a run ends with actor and
    generation: actor i + 1 waits for what is left of reward i + 1, r s, a run takes 10 + r, and r is 10 - r of the run
    before: 15 s on average.  Two ahead: reward i + 1 has a run of its own: 10 s.
    """
    chain = [("generation", "reward"), ("reward", "actor")]
    names = ("generation", "reward", "actor")
    work = planning.graph(names, chain, whole=True, weight_edges=(WeightEdge("actor", "generation"),))
    pricer = Pricer(work, planning.profile({name: planning.stage(10, 0) for name in names}), planning.cluster(3))
    plan = parse("generation on 0 > reward on 1 > actor on 2", 3, work)
    assert [seconds_of(plan, pricer, k) for k in range(4)] == pytest.approx([30.0, 15.0, 10.0, 10.0])
    assert rank(pricer, max_staleness=3).best.plan.staleness == 2


def test_data_that_waits_is_held() -> None:
    """8 blocks; the policy's data: 1e9 bytes per item on each of 2 devices with 4 blocks; 2e9 for a stage behind it."""
    pricer, plan = halves()
    edges = {("policy", "actor"): 1e9, ("env", "actor"): 2e9}
    pricer = pricer.with_(profile=replace(pricer.profile, edge_bytes_per_item=edges))
    held = [pricer.memory(replace(plan, staleness=k)) for k in (0, 1, 2)]
    assert [after[0] - before[0] for before, after in itertools.pairwise(held)] == pytest.approx([12e9, 12e9])
    assert [memory[2] for memory in held] == [held[0][2]] * 3


# ----------------------------------------------------------------------------------------------------------- the search
def flat(actor_s: float = 40.0) -> Pricer:
    """Every stage takes as long on one device as on two: only running ahead makes use of the other."""
    work, measured = planning.embodied((5, 0), (5, 0), (actor_s, 0))
    return Pricer(work, measured, planning.cluster(2))


def test_a_plan_that_runs_ahead_is_found_where_it_pays(few_moves) -> None:
    # rollout: 4 * (5 + 5) = 40 s, actor 40 s; one after the other 80 s, ahead of each other 40 s
    fresh, stale = rank(flat()).best, rank(flat(), max_staleness=1).best
    assert (fresh.plan.staleness, fresh.iteration_s) == (0, pytest.approx(80.0))
    assert (stale.plan.staleness, stale.iteration_s) == (1, pytest.approx(40.0))
    assert rank(flat(), max_staleness=2).best.plan.staleness == 1  # more gains nothing


def test_a_larger_staleness_has_to_save_a_twentieth(few_moves) -> None:
    # the actor takes 2 s beside 40: 42 s fresh, 40 s ahead: 4.8 %; 2.2 s: 5.2 %
    plans = rank(flat(2.0), max_staleness=1).plans
    assert (plans[0].plan.staleness, plans[0].iteration_s) == (0, pytest.approx(42.0))
    assert (plans[1].plan.staleness, plans[1].iteration_s) == (1, pytest.approx(40.0))
    assert plans[1].why_not.startswith("saves 4.8%, but a larger staleness has to save 5%")
    assert plans[1].label.endswith("; staleness 1")
    assert rank(flat(2.2), max_staleness=1).best.plan.staleness == 1


def test_memory_bounds_how_far_a_front_runs_ahead(few_moves) -> None:
    # 8 items of 1 GB wait on the policy's device; 10 GB hold one set of them, not two
    work, measured = planning.embodied((5, 0), (5, 0), (40, 0))
    measured = replace(measured, edge_bytes_per_item={("policy", "actor"): 1e9})
    pricer = Pricer(work, measured, planning.cluster(2, 10e9))
    for entry in rank(pricer, min_staleness=1, max_staleness=1).plans:
        assert entry.peak_bytes <= 10e9
    with pytest.raises(PlanError, match=r"GB short: .* or a smaller staleness"):
        rank(pricer, min_staleness=3, max_staleness=3)


def test_a_better_plan_keeps_the_staleness(few_moves) -> None:
    pricer = flat()
    worst = rank(pricer, min_staleness=1, max_staleness=1).plans[-1].plan
    better = replan(pricer, worst, {}, 1000, 0.0).plan
    assert better is not None
    assert better.staleness == worst.staleness == 1
    assert better.items != worst.items


# ---------------------------------------------------------------------------------------------------------------- rules
def test_rounds_that_need_new_weights_cannot_run_ahead() -> None:
    stages = {n: StageSpec(n, "fake", None, whole=True) for n in "abc"}
    decide = lambda rounds: RepeatDecision(True)  # noqa: E731
    again = Repeat("r", "c", "b", decide, 2)
    work = Workflow("w", 2, stages, (Edge("a", "b"), Edge("b", "c")), (WeightEdge("b", "a"),), repeat=again)
    with pytest.raises(PlanError, match=r"repeats \['a', 'b'\] .* \['b'\] cannot run ahead"):
        parse("a+b+c on 0; staleness 1", 1, work)
    later = replace(work, weight_edges=(WeightEdge("c", "a"),))
    assert parse("a+b+c on 0; staleness 1", 1, later).staleness == 1
