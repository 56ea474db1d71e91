"""The graph of the reasoning workflow, without imports of torch or Ray, since planning needs only the graph.

workflow.py has a diagram.  Profiles from publications have one stage "logprob" before the learners, and no "prompts".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

_PACKAGE = __name__.rpartition(".")[0]
_CLASSES = {  # in the order of data flow
    "prompts": "prompt_stage.PromptStage",
    "episodes": "episodes.EpisodeStage",
    "generation": "generation_stage.GenerationStage",
    "reward_model": "reward_stage.RewardModelStage",
    "reward": "reward_stage.RewardStage",
    "old_log_probs": "generation_stage.LogProbStage",
    "reference": "generation_stage.LogProbStage",
    "logprob": "generation_stage.LogProbStage",
    "critic": "critic_stage.CriticStage",
    "actor": "actor_stage.ActorStage",
}
_LEARNERS = ("critic", "actor")
_EDGES = (
    *(("prompts", "generation"), ("generation", "reward")),
    *(("generation", name) for name in ("old_log_probs", "reference", "critic", "reward_model")),
    *(("episodes", name) for name in ("reward", "old_log_probs", "reference", "critic", "actor", "reward_model")),
    ("reward_model", "reward"),
    ("reward", "critic"),
    *((name, "actor") for name in ("generation", "reward", "old_log_probs", "reference", "critic")),
)
_PUBLISHED = (
    *(("generation", "reward"), ("generation", "logprob"), ("reward", "critic"), ("logprob", "critic")),
    *(("logprob", "actor"), ("critic", "actor"), ("reward", "actor")),
)


def reasoning_graph(
    stages: Collection[str],
    num_blocks: int,
    *,
    items_per_block: int,
    blocks_per_batch: int,
    wait_for_all: bool = False,
    repeat: Repeat | None = None,
    configs: Mapping[str, object] = MappingProxyType({}),
    waiting: Collection[str] = (),
    receivers: Collection[str] = ("generation", "old_log_probs"),
    changes: Collection[str] = (),
    turns: int = 1,
    devices_per_engine: int = 1,
) -> Workflow:
    """Returns the graph.

    The learners take blocks in chunks as these finish, and accumulate gradients.  They wait for all blocks if there is
    a critic, more than one optimizer step (whose ratio needs old log-probs) or a repeat, except in published profiles.

    Args:
        stages: names of the stages; `episodes` instead of `prompts` forms a loop with generation.
        num_blocks: number of blocks.
        items_per_block: completions in a block.
        blocks_per_batch: blocks that generation decodes together.
        wait_for_all: whether the learners wait for all blocks in any case.
        repeat: dynamic sampling.
        configs: constructor arguments of stages; without them the graph can be planned but not run.
        waiting: stages that mostly wait for resources outside the cluster.
        receivers: stages that get new weights.
        changes: receivers that get only changed entries (WeightEdge).
        turns: largest number of turns of the loop.
        devices_per_engine: devices that each worker of generation uses.
    """
    names, episodic = [name for name in _CLASSES if name in stages], "episodes" in stages
    published = not episodic and "prompts" not in stages
    wait_for_all |= not published and (repeat is not None or bool({"critic", "old_log_probs"} & set(stages)))
    ends = [(a, b) for a, b in (_PUBLISHED if published else _EDGES) if a in names and b in names]
    if episodic:  # the stage `episodes` sends the completions
        ends = [(a, b) for a, b in ends if a != "generation"]
    if published and "critic" in names and ("reward", "actor") in ends:
        ends.remove(("reward", "actor"))
    specs = {
        name: StageSpec(
            *(name, f"{_PACKAGE}.{_CLASSES[name]}", configs.get(name)),
            collective=name in _LEARNERS,
            whole=wait_for_all and name in _LEARNERS,
            at_once=name == "generation" and not episodic,
            waits=name in waiting,
            blocks_per_batch=blocks_per_batch if name == "generation" and not episodic else 1,
            devices_per_worker=devices_per_engine if name == "generation" else 1,
        )
        for name in names
    }
    return Workflow(
        name="reasoning",
        num_blocks=num_blocks,
        stages=specs,
        edges=tuple(Edge(a, b, whole=wait_for_all and b in _LEARNERS) for a, b in ends),
        weight_edges=tuple(WeightEdge("actor", name, name in changes) for name in receivers if name in names),
        loops={"episode": Loop("episode", "episodes", "generation", turns)} if episodic else {},
        repeat=repeat,
        items_per_block=items_per_block,
        more_blocks="use more algorithm.prompts_per_iteration, a smaller generation.rows_per_block and rows_per_batch",
        of_workload=f"{__name__}.of_workload",
    )


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; it is not run, so its repeat decides nothing."""
    decide = lambda rounds: RepeatDecision(True)  # noqa: E731
    return reasoning_graph(
        stages,
        work.num_items // work.items_per_block,
        items_per_block=work.items_per_block,
        blocks_per_batch=work.blocks_per_batch,
        devices_per_engine=work.devices_per_worker,
        repeat=Repeat("resample", "actor", "reward", decide, work.max_rounds) if work.max_rounds > 1 else None,
        turns=work.chunk_steps,
    ).with_rounds(work.expected_rounds)
