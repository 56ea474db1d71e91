# ruff: noqa: D101
"""Tabular Q-learning as a custom workflow: measured, planned and run on Ray by the same code that trains VLAs.

python -m experiments.examples.q_learning [env=CliffWalking-v1] [rates=0.5,0.2,0.05] [iterations=30]
collect --steps--> replay --batches--> learn0, learn1, ... (a learning rate each)      learn0 ~~Q~~> collect
"""

from dataclasses import dataclass
from typing import cast

import gymnasium
import torch

from rlinf_embodied.cluster.hardware import Cluster, local_cluster
from rlinf_embodied.command_line import main
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import measure
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.planning.explain import Ranked, rank
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.randomness import reset_seed, uniform
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.workflow.graph import Edge, StageSpec, WeightEdge, Workflow

HERE = "experiments.examples.q_learning"  # where workers find the stages
STEPS, EPISODES, BATCH, UPDATES, GAMMA, EXPLORE = 100, 4, 64, 20, 0.98, 0.2  # episodes and batch rows: per block


class Collect:
    q: torch.Tensor  # [S, A]
    memory: dict[int, torch.Tensor]  # steps [n, 5] of each block

    def __init__(self, config: tuple[str, int, float]) -> None:
        self.task, self.number, self.rate = config  # of the learner whose table this is

    def setup(self, context: StageContext) -> None:
        self.context, self.env, self.memory = context, gymnasium.make(self.task, max_episode_steps=STEPS), {}
        shape = [int(space.n) for space in (self.env.observation_space, self.env.action_space)]  # pyright: ignore
        table = context.share(f"q{self.number}", lambda: torch.zeros(shape, dtype=torch.float64))
        self.q = cast(torch.Tensor, table)

    def episode(self, seed: int, noise: torch.Tensor) -> torch.Tensor:
        """Returns (state, action, reward, next state, continues) of each step; noise [STEPS, 2] explores."""
        (state, _), found, over = self.env.reset(seed=seed), [], False
        while not over:
            explores, which = (float(x) for x in noise[len(found)])
            action = int(which * self.q.shape[1]) if explores < EXPLORE else int(self.q[state].argmax())
            after, reward, terminated, truncated, _ = self.env.step(action)
            found.append((state, action, reward, after, not terminated))
            state, over = after, terminated or truncated
        return torch.tensor(found, dtype=torch.float64)

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        keys = {block: [(block, step_context.iteration, number) for number in range(EPISODES)] for block in inputs}
        noise = lambda key: torch.from_numpy(uniform(0, "explore", *key, shape=(STEPS, 2)))  # noqa: E731
        return Output({b: torch.cat([self.episode(int(reset_seed(0, *k)), noise(k)) for k in keys[b]]) for b in inputs})

    def install_weights(self, step_context: StepContext, message: torch.Tensor) -> None:
        self.q.copy_(message)


class Replay(Collect):
    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        self.memory = {
            b: torch.cat([self.memory[b], new] if b in self.memory else [new]) for b, (new,) in inputs.items()
        }
        draws = {
            b: torch.from_numpy(uniform(0, "replay", b, step_context.iteration, shape=(UPDATES, BATCH))) for b in inputs
        }
        return Output({b: memory[(draws[b] * len(memory)).long()] for b, memory in self.memory.items()})


class Learn(Collect):
    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        reducer = Reducer(self.context.group, self.context.owners)
        for k in range(UPDATES):  # sums over all blocks are along one fixed tree: the same bits under every plan
            total, count = reducer.sum_blocks({block: self.errors(batch[k]) for block, (batch,) in inputs.items()})
            self.q.add_(self.rate * total / count.clamp(min=1))
        return Output(dict.fromkeys(inputs), self.q.clone())

    def errors(self, batch: torch.Tensor) -> torch.Tensor:
        state, action, reward, after, goes_on = batch.long().T
        error = reward + GAMMA * goes_on * self.q[after].amax(-1) - self.q[state, action]
        both, flat = torch.stack([error, torch.ones_like(error)]), state * self.q.shape[1] + action
        return both.new_zeros(2, self.q.numel()).index_add_(1, flat, both).reshape(2, *self.q.shape)

    def export_weights(self, step_context: StepContext) -> torch.Tensor:
        return self.q.clone()

    def evaluate(self, step_context: StepContext) -> float:
        return float(self.episode(1, torch.ones(STEPS, 2))[:, 2].sum())  # noise of 1: always the greedy action


def workflow(env: str, rates: list[float], num_blocks: int = 4) -> Workflow:
    learners = [f"learn{i}" for i in range(len(rates))]
    stages = {
        name: StageSpec(name, f"{HERE}.{name.title()}", (env, 0, 0.0), whole=True) for name in ("collect", "replay")
    }
    for i, (name, rate) in enumerate(zip(learners, rates, strict=True)):
        stages[name] = StageSpec(name, f"{HERE}.Learn", (env, i, rate), collective=True, whole=True)
    edges = (Edge("collect", "replay"), *(Edge("replay", name) for name in learners))
    return Workflow("q_learning", num_blocks, stages, edges, (WeightEdge("learn0", "collect"),))


def train(flow: Workflow, session: Session, cluster: Cluster, iterations: int) -> tuple[Ranked, list]:
    profile = measure(flow, session, cluster, flow.name, {}, lambda *progress: None, budget_s=5.0)
    best = rank(Pricer(flow, profile, cluster)).best
    executor, returns = Executor(flow, best.plan, session, cluster), {}
    for k in range(iterations + 1):
        for name in [stage for stage in flow.stages if "learn" in stage and k in (0, iterations)]:
            returns.setdefault(name, []).extend(executor.call(name, "evaluate", StepContext(k))[:1])
        if k < iterations:
            executor.run(StepContext(k))
    return best, list(returns.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    env: str = "CliffWalking-v1"
    rates: str = "0.5"
    iterations: int = 30


def learn(own: Options) -> None:
    from rlinf_embodied.runtime.ray_session import RaySession

    flow = workflow(own.env, [float(rate) for rate in own.rates.split(",")])
    best, returns = train(flow, session := RaySession(), local_cluster(None), own.iterations)
    session.close()
    print(f"{best.label}: {best.iteration_s:.3f} s per iteration predicted; return before and after: {returns}")


if __name__ == "__main__":
    main(learn, Options)
