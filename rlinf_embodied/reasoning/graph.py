"""The reasoning workflow's graph; it imports nothing heavy, as planning does with it alone.

The diagram is in workflow.py.  Systems whose costs were published have one stage "logprob" before their learners, and
no stage for prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

_PACKAGE = __name__.rpartition(".")[0]
_CLASSES = {  # in the order of the data
    "prompts": "prompt_stage.PromptStage",
    "episodes": "episodes.EpisodeStage",
    "generation": "generation_stage.GenerationStage",
    "reward_model": "reward_model_stage.RewardModelStage",
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
    together: bool = False,
    repeat: Repeat | None = None,
    configs: Mapping[str, object] = MappingProxyType({}),
    waiting: Collection[str] = (),
    receivers: Collection[str] = ("generation", "old_log_probs"),
    changes: Collection[str] = (),
    turns: int = 1,
) -> Workflow:
    """Returns the graph; with `episodes` in the place of `prompts`, these and generation take up to `turns` turns.

    The learners take answers in chunks as they are finished, and accumulate gradients over them.  They wait for all of
    them where there is a critic, more than one optimizer step (whose ratio needs old log-probs) or a repeat; those of
    published systems do not.

    With `together` the learners wait for all answers in any case.  Without `configs` of the stages the graph can be
    planned but not run.  `waiting` are stages that wait for something that is none of the cluster's,
    `receivers` those that get new weights, `changes` those of them that get what changed (WeightEdge).
    """
    names, episodic = [name for name in _CLASSES if name in stages], "episodes" in stages
    published = not episodic and "prompts" not in stages
    together |= not published and (repeat is not None or bool({"critic", "old_log_probs"} & set(stages)))
    ends = [(a, b) for a, b in (_PUBLISHED if published else _EDGES) if a in names and b in names]
    if episodic:  # the loop's opener has the data
        ends = [(a, b) for a, b in ends if a != "generation"]
    if published and "critic" in names and ("reward", "actor") in ends:
        ends.remove(("reward", "actor"))
    specs = {
        name: StageSpec(
            *(name, f"{_PACKAGE}.{_CLASSES[name]}", configs.get(name)),
            collective=name in _LEARNERS,
            whole=together and name in _LEARNERS,
            at_once=name == "generation" and not episodic,
            waits=name in waiting,
            blocks_per_batch=blocks_per_batch if name == "generation" and not episodic else 1,
        )
        for name in names
    }
    return Workflow(
        name="reasoning",
        num_blocks=num_blocks,
        stages=specs,
        edges=tuple(Edge(a, b, whole=together and b in _LEARNERS) for a, b in ends),
        weight_edges=tuple(WeightEdge("actor", name, name in changes) for name in receivers if name in names),
        loops={"episode": Loop("episode", "episodes", "generation", turns)} if episodic else {},
        repeat=repeat,
        items_per_block=items_per_block,
        more_blocks="use more algorithm.prompts_per_iteration, a smaller generation.rows_per_block and rows_per_batch",
        of_workload=f"{__name__}.of_workload",
    )


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for; its repeat decides nothing, as nothing runs."""
    decide = lambda rounds: RepeatDecision(True)  # noqa: E731
    return reasoning_graph(
        stages,
        work.num_items // work.items_per_block,
        items_per_block=work.items_per_block,
        blocks_per_batch=work.blocks_per_batch,
        repeat=Repeat("resample", "actor", "reward", decide, work.max_rounds) if work.max_rounds > 1 else None,
        turns=work.chunk_steps,
    ).with_rounds(work.expected_rounds)
